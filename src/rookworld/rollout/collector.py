"""JOINT: model x task. Prompts become groups of sampled, judged answers.

Laws: the ids that were sampled are the ids that are trained on, with the log-probabilities recorded
while sampling; a group stays whole; which prompts a step sees is a function of (seed, position),
and a sample of (seed, step, prompt, number), so neither depends on the world size. A bad answer is
data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch

from rookworld.grpo.advantages import flat_groups, reward_tensor, valid_groups
from rookworld.model.activation_reuse import ActivationStore
from rookworld.model.gpt2 import GPT2
from rookworld.model.sampling.sampler import ROWS_AT_ONCE, Sampling, sampler_for
from rookworld.model.tokenizer import Tokenizer
from rookworld.rollout.guide import Asked, guided, solved_by_class, solves, to_guide
from rookworld.rollout.prompts import Prompts
from rookworld.rollout.token_values import listed_move_values, token_values
from rookworld.rollout.types import Completions, Group, Prompt, TokenValues
from rookworld.runtime import distributed
from rookworld.tasks.prefix_value import NEUTRAL, NOTHING_LISTED, Tally, Usual
from rookworld.tasks.registry import task_of
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.scorer import Question, Scorer, Scores, Workers, judge_answer, prefetch
from rookworld.tasks.task import Judge


@dataclass(frozen=True)
class Collector:
    """How answers are collected: who samples, under which settings, and who judges."""

    model: GPT2
    tokenizer: Tokenizer
    sampling: dict[str, Sampling]
    """By task letter."""
    k: int
    seed: int
    rules: RewardRules
    judge: Judge | None = None
    by_field: bool = False
    """Also work out what each answer was worth while it was written."""
    by_choice: bool = False
    """And what every move was worth that could have been listed."""
    usual: Usual = NEUTRAL
    """Which quality the rest of an answer is taken to be of."""
    activations: ActivationStore | None = None
    """Where the sampler keeps what it computed."""
    dtype: torch.dtype | None = None
    """What the sampler's matrices are in; default: as the model's."""
    workers: Workers | None = None
    """Who scores a part of the answers while the next part is sampled; default: nobody else."""
    meanwhile: Callable[[Sequence[Completions]], None] = field(default=lambda answers: None)
    """Called with answers while others score them."""
    idle: Callable[[], None] = field(default=lambda: None)
    """Called when all answers are sampled and others still score them, also without any prompt:
    ranks may have something to agree on."""
    clock: Callable[[str], Any] = field(default=lambda name: None)
    """Called with "sample" at the end of a stretch of sampling, with "score" at that of others."""

    def groups(self, prompts: Sequence[Prompt], step: int, progress: float) -> list[Group]:
        """Sampled and judged answers to each prompt, in the prompts' order."""
        if not prompts:
            self.idle()
            return []
        scorer = Scorer(self.rules, progress, self.by_field, self.judge, self.by_choice, self.usual)
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place].ids))
        most = len(order) if self.workers is None else max(1, ROWS_AT_ONCE // self.k)
        waiting = []
        for at in range(0, len(order), most):
            answers = self.sample([prompts[place] for place in order[at : at + most]], step)
            self.clock("sample")
            questions = self.questions(answers)
            waiting.append((answers, questions, self.start_scoring(scorer, questions)))
            self.meanwhile(answers)
            self.clock("score")
        self.idle()
        groups = [group for one in waiting for group in self.build_groups(*one)]
        self.clock("score")
        return [group for _, group in sorted(zip(order, groups, strict=True), key=lambda x: x[0])]

    def sample(self, prompts: Sequence[Prompt], step: int) -> list[Completions]:
        """K answers to each prompt."""
        samples = sampler_for(self.model, self.dtype).sample(
            [prompt.ids for prompt in prompts],
            k=self.k,
            settings=[self.sampling[prompt.letter] for prompt in prompts],
            eos=self.tokenizer.eos,
            seed=self.seed,
            step=step,
            keys=[prompt.key for prompt in prompts],
            activations=self.activations,
        )
        lengths = samples.lengths.tolist()
        ids = samples.tokens.cpu().numpy()
        finished = samples.finished.tolist()
        found = []
        for place, prompt in enumerate(prompts):
            mine = slice(place * self.k, (place + 1) * self.k)
            longest = max(lengths[mine])
            found.append(
                Completions(
                    prompt,
                    samples.tokens[mine, :longest],
                    samples.lengths[mine],
                    samples.logp[mine, :longest],
                    samples.entropy[mine, :longest],
                    ids[mine],
                    lengths[mine],
                    tuple(finished[mine]),
                )
            )
        return found

    def questions(self, answers: Sequence[Completions]) -> list[Question]:
        """Answers as texts."""
        texts = self.tokenizer.decode_batch(
            [
                row[:length]
                for one in answers
                for row, length in zip(one.ids.tolist(), one.counts, strict=True)
            ]
        )
        return [
            Question(one.prompt.row, tuple(texts[at : at + self.k]), one.finished)
            for at, one in zip(range(0, len(texts), self.k), answers, strict=True)
        ]

    def start_scoring(
        self, scorer: Scorer, questions: list[Question]
    ) -> Callable[[], list[Scores]]:
        """Have answers scored by the workers, or by ourselves when asked for."""
        judge = self.judge
        if judge is None:
            here = partial(scorer.all, questions)
            return here if self.workers is None else self.workers.begin(scorer.all, questions)

        def score() -> list[Scores]:
            # an engine cannot be handed to another process
            rows = [question.row for question in questions]
            prefetch(judge, rows, every_move=self.by_choice)
            return scorer.all(questions)

        return score

    def build_groups(
        self,
        answers: Sequence[Completions],
        questions: Sequence[Question],
        scored: Callable[[], list[Scores]],
    ) -> list[Group]:
        """Answers with their verdicts, when these are there."""
        scores = scored()
        values: Sequence[TokenValues | None] = [None] * len(answers)
        if self.by_field:
            values = token_values(answers, [one.prefix_values for one in scores], self.tokenizer)
        return [
            Group(
                one.prompt,
                one.tokens,
                one.lengths,
                one.logp,
                one.entropy,
                question.finished,
                question.texts,
                found.verdicts,
                value,
                listed_move_values(one, found.move_values, self.tokenizer)
                if found.move_values
                else None,
                found.tally,
            )
            for one, question, found, value in zip(answers, questions, scores, values, strict=True)
        ]

    def true_answer(self, group: Group, progress: float) -> Group | None:
        """The truth as an answer to the group's prompt; None where it would teach nothing."""
        row, room = group.prompt.row, self.model.config.n_positions - len(group.prompt.ids)
        text = str(task_of(row).answer(row, self.tokenizer.style))
        verdict = judge_answer(row, text, True, self.rules, self.judge, progress)
        found = guided(group, text, verdict, self.tokenizer)
        longest = min(room, self.sampling[group.prompt.letter].max_new_tokens)
        better = verdict.total > fmean(group.rewards)
        return found if better and found.tokens.shape[1] <= longest else None


@dataclass(frozen=True)
class Collected:
    """What a step trains on: this rank's groups, and what became of all ranks' groups."""

    groups: list[Group]
    flat: int
    """Groups without spread that were met, replaced ones included."""
    invalid: int
    """Groups with a reward that is not a finite number: never trained on."""
    seen: int
    """Groups sampled in all."""
    anchors: list[Group] = field(default_factory=list)
    """This rank's replaced groups that still hold their task to the reference."""
    tally: Tally = NOTHING_LISTED
    """What all ranks' analyses listed, replaced ones included; with credit by field."""
    guides: list[Group] = field(default_factory=list)
    """True answers to this rank's prompts that nobody solved, replaced ones included."""
    solved: dict[str, tuple[int, int]] = field(default_factory=dict)
    """With guides: of each class how many prompts all ranks solved, and how many they met."""


def collect(
    collector: Collector,
    prompts: Prompts,
    count: int,
    step: int,
    progress: float,
    *,
    flat_tries: int,
    guide: float = 0.0,
    tolerance: float = 1e-6,
) -> Collected:
    """`count` groups over all ranks; groups without spread are replaced, a bounded number of times.

    Every rank draws the same prompts and answers its share, and all agree on which were flat, so
    the groups are those that one process would have collected. The last replacements are kept even
    if flat; a group with a reward that is no number is kept never. Where replacements came from
    another task, replaced groups stay as anchors, so that each task keeps its share of the KL: a
    solved one, all of whose groups are flat, would be forgotten. Beside `guide` x `count` groups
    without a right answer, at most, stands the truth.
    """
    collection = _Collection()
    missing = count
    for attempt in range(flat_tries + 1):
        drawn = prompts.take(missing)
        share = distributed.share(len(drawn))
        groups = collector.groups(drawn[share], step, progress)
        flags = flags_of(groups, share, len(drawn), tolerance, with_solved=guide > 0)
        if attempt == 0:
            collection.due.update(prompt.letter for prompt in drawn)
        last = attempt == flat_tries
        collection.add(drawn, dict(zip(range(len(drawn))[share], groups, strict=True)), flags, last)
        missing = int(flags[:, :2].amax(1).sum())
        if missing == 0:
            break
    found = collection.result(collector.by_field)
    if guide == 0:
        return found
    chosen = to_guide(collection.asked, math.ceil(guide * count))
    truths = [collector.true_answer(one.group, progress) for one in chosen if one.group is not None]
    guides = [truth for truth in truths if truth is not None]
    return replace(found, guides=guides, solved=solved_by_class(collection.asked))


def flags_of(
    groups: Sequence[Group], share: slice, drawn: int, tolerance: float, *, with_solved: bool
) -> torch.Tensor:
    """[prompts, 3] which groups of all ranks are flat, which have a reward that is no number, and
    which (if asked for) a right answer."""
    flags = torch.zeros(drawn, 3)
    if groups:
        rewards = reward_tensor([group.rewards for group in groups])
        right = torch.tensor([with_solved and solves(group) for group in groups])
        found = torch.stack([flat_groups(rewards, tolerance), ~valid_groups(rewards), right], 1)
        flags[share] = found.float()
    distributed.sum_over_ranks(flags)
    return flags


@dataclass
class _Collection:
    """What `collect` has so far; all ranks count alike, each keeps its own groups."""

    kept: list[Group] = field(default_factory=list)
    replaced: list[tuple[str, Group | None]] = field(default_factory=list)
    due: Counter[str] = field(default_factory=Counter)
    """By task, how many groups its share of the step still lacks."""
    flat: int = 0
    invalid: int = 0
    seen: int = 0
    listed: Tally = NOTHING_LISTED
    asked: list[Asked] = field(default_factory=list)
    """All prompts but those with a reward that is no number."""

    def add(
        self,
        drawn: Sequence[Prompt],
        mine: dict[int, Group],
        flags: torch.Tensor,
        last: bool,
    ) -> None:
        """Take in one attempt: `mine` are this rank's groups by their place among `drawn`."""
        for place, (is_flat, is_invalid, is_solved) in enumerate(flags.tolist()):
            group, letter = mine.get(place), drawn[place].letter
            if group is not None:
                self.listed = self.listed.plus(group.tally)
            if is_invalid:
                continue
            self.asked.append(Asked(drawn[place], bool(is_solved), group))
            if is_flat and not last:
                self.replaced.append((letter, group))
                continue
            self.due[letter] -= 1
            if group is not None:
                self.kept.append(group)
        self.flat += int(flags[:, 0].sum())
        self.invalid += int(flags[:, 1].sum())
        self.seen += len(drawn)

    def result(self, with_tally: bool) -> Collected:
        total = torch.tensor(self.listed, dtype=torch.float64)
        if with_tally:
            distributed.sum_over_ranks(total)
        anchors = [group for group in due_to(self.replaced, self.due) if group is not None]
        tally = Tally(*total.tolist())
        return Collected(self.kept, self.flat, self.invalid, self.seen, anchors, tally)


def due_to(replaced: Sequence[tuple[str, Group | None]], due: Counter[str]) -> list[Group | None]:
    """The first of each task's replaced groups, as many as the task is short of."""
    chosen = []
    for letter, group in replaced:
        if due[letter] > 0:
            due[letter] -= 1
            chosen.append(group)
    return chosen
