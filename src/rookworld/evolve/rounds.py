"""LOOP: play, verify, train, compare, keep or refuse; the published Evol loop as a composition.

Laws: a round is a function of the model before it, its number and the settings, so a loop that was
killed anywhere goes on with the same rounds (bit by bit on the CPU); each part of a round leaves a
file when it is whole, and is not done again. A model goes on only if it is better than the one
before on the same held-out rows, paired, beyond the 95 % interval of the difference; else the one
before does. `rounds.jsonl` has a line a round.

Left out on purpose: several processes, and a correction for looking at the same held-out rows round
after round (docs/evolve.md).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rookworld.data.files import read_records, write_records
from rookworld.data.openings import openings
from rookworld.data.rows import record_row, row_record, task_name
from rookworld.data.sources import load_rows
from rookworld.evaluation.evaluate import (
    Evaluation,
    HeldOut,
    evaluate,
    held_out_from,
    load_found,
    paired,
    save_found,
)
from rookworld.evaluation.games import ModelPlayer, selfplay
from rookworld.evaluation.generator import ModelAnswerer, Progress, load_answerer
from rookworld.evaluation.statistics import PairedDifference
from rookworld.evaluation.world_model import walk_worlds, world_estimates
from rookworld.evolve.harvest import Recorder, harvest, replays
from rookworld.evolve.settings import EvolveSettings
from rookworld.evolve.training import OWN_ROWS, Hooks, train_round
from rookworld.runtime.atomic_files import write_json, write_text
from rookworld.runtime.config import of_run, resolved, short_hash
from rookworld.runtime.errors import ConfigError
from rookworld.runtime.run_folder import ROUNDS, finite, origin, read_json, read_lines
from rookworld.runtime.run_lock import locked
from rookworld.runtime.wording import noun
from rookworld.tasks.engine import find_engine
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.judge import StockfishJudge
from rookworld.tasks.notation import position_key
from rookworld.tasks.policy import POLICY
from rookworld.tasks.task import Judge, Row

Say = Callable[[str], None]
Record = dict[str, Any]
PLAYED, START = "played.json", "start.npz"
SAMPLED = "reward/sampled"
CONFIRMING = "embedded:test"
"""Rows that decide nothing here, so that what was kept can be looked at afresh."""


@dataclass(frozen=True)
class Arena:
    """What all rounds share."""

    settings: EvolveSettings
    held_out: HeldOut
    left_out: frozenset[str]
    """Positions that must not be trained on."""
    judge: Judge | None
    say: Say
    progress: Progress


def evolve(
    settings: EvolveSettings,
    say: Say = lambda line: None,
    progress: Progress = lambda what, done, total: None,
) -> list[Record]:
    """All rounds; the lines of `rounds.jsonl`."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("evolve runs in one process; start it without torchrun")
    held = held_out(settings)
    with locked(settings.out / ".lock", "evolving"), open_judge(settings) as judge:
        begin(settings, say)
        arena = Arena(settings, held, tested_positions(settings), judge, say, progress)
        for number in range(len(rounds_of(settings.out)) + 1, settings.rounds + 1):
            done = rounds_of(settings.out)
            record = play_round(arena, number, last_kept(done))
            lines = [json.dumps(finite(one)) + "\n" for one in (*done, record)]
            write_text(settings.out / ROUNDS, "".join(lines))
            say(told(record))
        return rounds_of(settings.out)


def held_out(settings: EvolveSettings) -> HeldOut:
    """The rows that models are compared on, the same in every round."""
    counts = {
        POLICY.letter: settings.eval_policy_rows,
        ENVIRONMENT.letter: settings.eval_environment_rows,
    }
    return held_out_from(settings.held_out, counts, n_mates=0)


def tested_positions(settings: EvolveSettings) -> frozenset[str]:
    """Those of the held-out source, and those that a kept model is confirmed on.

    All of the source: a loop that goes on may be told to compare on more of its rows.
    """
    rows = (*load_rows(settings.held_out), *load_rows(CONFIRMING))
    return frozenset(position_key(row.fen) for row in rows)


def open_judge(settings: EvolveSettings) -> AbstractContextManager[Judge | None]:
    if settings.judge == "rules":
        return nullcontext()
    return StockfishJudge(find_engine(settings.engine), nodes=settings.nodes)


def begin(settings: EvolveSettings, say: Say) -> None:
    """Make room, or go on; what is there is deleted only to overwrite it."""
    out, rounds = settings.out, settings.out / "rounds"
    own = of_run(EvolveSettings(), out)  # refuses the folder of another command's run
    there = rounds.exists() or (out / ROUNDS).exists()
    if there and own is None:
        raise ConfigError(
            f"{out} holds rounds, but no config.json that says of what: choose another --out or "
            "move them"
        )
    if there and not (settings.resume or settings.overwrite):
        raise ConfigError(
            f"{out}: earlier rounds are here; --resume goes on with them, --overwrite deletes "
            "them and starts over, another --out leaves them alone"
        )
    if there and settings.resume and own is not None:
        refuse_other(own, settings)
    if there and not settings.resume:
        say(f"{out}: replaces earlier rounds")
        (out / ROUNDS).unlink(missing_ok=True)
        (out / START).unlink(missing_ok=True)
        shutil.rmtree(rounds, ignore_errors=True)
    write_json(out / "config.json", resolved(settings))
    if not (there and settings.resume):
        write_json(out / "origin.json", origin(settings.seed, settings.engine))


def refuse_other(own: EvolveSettings, settings: EvolveSettings) -> None:
    """What rounds began with, or were kept by, cannot be another in those that follow."""
    for name, what in (("model", "began with"), ("held_out", "are compared on")):
        before, now = getattr(own, name), getattr(settings, name)
        if before != now:
            raise ConfigError(
                f"--{name.replace('_', '-')} {now}: the rounds in {settings.out} {what} {before}; "
                "leave it out, or choose another --out"
            )


def rounds_of(folder: Path) -> list[Record]:
    """The rounds that are over."""
    return list(read_lines(folder / ROUNDS))


def last_kept(done: Sequence[Record]) -> int:
    """The last round that was kept; 0 if none was."""
    return max((int(record["round"]) for record in done if record["kept"]), default=0)


def model_of(settings: EvolveSettings, kept: int) -> str:
    """The model that goes on: that of the last round that was kept, else where it all began."""
    return str(folder_of(settings, kept) / "final") if kept else settings.model


def found_of(settings: EvolveSettings, kept: int) -> Path:
    """Where that model's evaluation is kept."""
    return folder_of(settings, kept) / "after.npz" if kept else settings.out / START


def folder_of(settings: EvolveSettings, number: int) -> Path:
    return settings.out / "rounds" / f"round-{number:03d}"


def play_round(arena: Arena, number: int, kept: int) -> Record:
    """One round, from the model of the round that was kept last: its line of the log."""
    settings, folder = arena.settings, folder_of(arena.settings, number)
    model = model_of(settings, kept)
    before = evaluation_of(arena, model, found_of(settings, kept))
    if settings.select_by not in before.rows:
        raise ConfigError(
            f"--select-by {settings.select_by}: not measured on the held-out rows; there are "
            f"{', '.join(sorted(before.rows))}"
        )
    arena.say(f"round {number}: {settings.games} games of {model}")
    played = play(arena, number, model)
    record: Record = {"round": number, "before_model": model, "kept": False, "model": model}
    record |= {"played": played, "select_by": settings.select_by}
    record["before"] = before.estimates[settings.select_by].to_json()
    own = [record_row(one) for one in read_records(folder / OWN_ROWS)]
    if not own:
        return record | {"why": "no game gave a row to learn from"}
    hooks = Hooks(arena.say, lambda step: arena.progress("training", step, settings.steps))
    final = train_round(settings, model, number, folder, own, arena.judge, hooks)
    after = evaluation_of(arena, str(final), found_of(settings, number))
    found = paired(before, after)
    record["after"] = after.estimates[settings.select_by].to_json()
    record["paired"] = {name: one.to_json() for name, one in found.items()}
    better, why = decide(found.get(settings.select_by))
    return record | {"kept": better, "why": why, "model": str(final) if better else model}


def decide(difference: PairedDifference | None) -> tuple[bool, str]:
    """Whether a model goes on, and why."""
    if difference is None:
        return False, "nothing to compare"
    if difference.low > 0:
        return True, "better beyond the interval"
    return False, "worse beyond the interval" if difference.high < 0 else "no clear difference"


def evaluation_of(arena: Arena, model: str, path: Path) -> Evaluation:
    """A model on the held-out rows; measured once, and kept row by row."""
    asked = asked_of(arena.settings, model)
    found = load_found(path, asked)
    if found is None:
        answerer = load(arena, model, arena.settings.seed)
        found = measure(arena.settings, arena.held_out, answerer)
        save_found(path, found, asked)
    return found


def load(arena: Arena, model: str, seed: int) -> ModelAnswerer:
    """A model that answers."""
    device, progress = arena.settings.device, arena.progress
    return load_answerer(model, device=device, seed=seed, progress=progress)


def measure(settings: EvolveSettings, held: HeldOut, answerer: ModelAnswerer) -> Evaluation:
    """Every metric of the held-out rows; sampled answers only where they decide."""
    sampled = answerer.sampling(1.0, samples=4) if settings.select_by == SAMPLED else None
    return evaluate(answerer, held, sampled=sampled)


def asked_of(settings: EvolveSettings, model: str) -> str:
    """What an evaluation depends on, but for the weights."""
    names = ("held_out", "eval_policy_rows", "eval_environment_rows", "select_by", "seed")
    return f"{short_hash(settings, ignore=set(resolved(settings)) - set(names))} {model}"


def play(arena: Arena, number: int, model: str) -> Record:
    """The round's games and their verified rows; what they amount to. Done once."""
    settings, folder = arena.settings, folder_of(arena.settings, number)
    if (folder / PLAYED).exists():
        return dict(read_json(folder / PLAYED))
    seed = settings.seed + number
    answerer = load(arena, model, seed)
    recorder = Recorder(answerer.sampling(settings.play_temperature, top_k=settings.play_top_k))
    starts = openings(settings.games, seed)
    estimates = play_games(recorder, starts, settings)
    games = replays(recorder.answers, starts)
    rows = harvest(games, arena.judge, arena.left_out)
    write_records(folder / OWN_ROWS, [row_record(row) for row in rows], {})
    played = {
        "games": len(games),
        "won": sum(game.winner is not None for game in games),
        "plies": sum(len(game.plies) for game in games),
        "rows": count(rows),
        "estimates": estimates,
    }
    write_json(folder / PLAYED, finite(played))
    return played


def play_games(
    recorder: Recorder, starts: Sequence[tuple[str, ...]], settings: EvolveSettings
) -> Mapping[str, Any]:
    """By the rules, or in the model's own world; what is known of the games."""
    if settings.world:
        walks = walk_worlds(recorder, len(starts), starts=starts, max_plies=settings.max_plies)
        found = world_estimates(walks)
    else:
        player = ModelPlayer(recorder)
        found = selfplay(player, len(starts), starts=starts, max_plies=settings.max_plies).estimates
    return {name: one.to_json() for name, one in found.items()}


def count(rows: Sequence[Row]) -> dict[str, int]:
    names = [task_name(row) for row in rows]
    return {name: names.count(name) for name in sorted(set(names))}


def told(record: Record) -> str:
    """A round in a sentence."""
    number, name = record["round"], record["select_by"]
    end = "kept" if record["kept"] else f"refused, {record['before_model']} goes on"
    if "after" not in record:
        return f"round {number}: {record['why']}; {end}"
    difference = record["paired"].get(name)
    change = f"{record['before']['value']:.4f} -> {record['after']['value']:.4f}"
    if difference is not None:
        low, high = difference["low"], difference["high"]
        change += f" ({difference['difference']:+.4f}, {low:+.4f} to {high:+.4f})"
    return f"round {number}: {name} {change}, {record['why']}; {end}"


def plan(settings: EvolveSettings) -> list[str]:
    """What the rounds would do, having read settings, data and the model's tokenizer."""
    from rookworld.model.tokenizer import Tokenizer
    from rookworld.model.weights import read_config, resolve_folder

    held, done = held_out(settings), rounds_of(settings.out)
    folder = resolve_folder(model_of(settings, last_kept(done)))
    shape, tokenizer = read_config(folder), Tokenizer.load(folder)
    others = sum(len(load_rows(source)) for source in settings.data)
    where = "its own world" if settings.world else "real games"
    return [
        f"model: {folder}, {shape.n_layer} layers, width {shape.n_embd}, {tokenizer.style} "
        "tokenizer",
        f"rounds: {len(done)} of {settings.rounds} done; each {settings.games} games, {where}, "
        f"verified by {settings.judge}",
        f"training: {settings.method}, {settings.steps} {noun(settings.steps, 'step')}, "
        f"{settings.share:.0%} own rows, the rest of {others:,} others",
        f"kept if {settings.select_by} is better on {len(held.rows):,} held-out rows",
    ]
