"""The card of an exported model: where it comes from, what it was measured at, how to use it.

Everything on it is read from the run that made the model; what the run does not say is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rookworld.runtime.run_folder import read_json, read_lines
from rookworld.tasks.registry import headline_metrics

HEADER = """---
license: gpl-3.0
library_name: transformers
pipeline_tag: text-generation
tags: [chess, grpo, rookworld]
---
"""


def model_card(folder: Path, name: str, parameters: int, style: str) -> str:
    """A README for the model in `folder`."""
    run = run_of(folder)
    parts = [f"{HEADER}\n# {name}\n", about(parameters, style), usage(style)]
    if run is not None:
        parts += [training(run), evaluation(run, step_of(folder))]
    parts.append("## Licence\n\nGPL-3.0-or-later, like RookWorld itself.\n")
    return "\n".join(part for part in parts if part)


def run_of(folder: Path) -> Path | None:
    """The run a checkpoint lies in, if it lies in one."""
    resolved = folder.resolve()
    return next((p for p in resolved.parents if (p / "origin.json").exists()), None)


def step_of(folder: Path) -> int | None:
    """The step after which a checkpoint was saved; None for a run's final model."""
    saved = folder.resolve()
    number = saved.name.rpartition("-")[2]
    return int(number) if saved.parent.name == "checkpoints" and number.isdigit() else None


def about(parameters: int, style: str) -> str:
    words = "a chess-native tokenizer" if style == "compact" else "GPT-2's byte pairs"
    return (
        f"A GPT-2 of {parameters / 1e6:.1f}M parameters with {words} that does two chess tasks: "
        "`P:` analyses a position (five moves, their evaluations, the best), `A:` is the "
        "environment (next position, reward, terminated, truncated).\n"
    )


def usage(style: str) -> str:
    prompt = (
        "P: rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1 M:"
        if style == "compact"
        else "P: rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
    )
    return (
        "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n'
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")\n'
        f'prompt = tokenizer("{prompt}", return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=144)[0]))\n```\n"
    )


def training(run: Path) -> str:
    origin, config = read_json(run / "origin.json"), read_json(run / "config.json")
    keys = (
        "model",
        "data",
        "steps",
        "batch_size",
        "k_samples",
        "lr",
        "kl_coef",
        "kl_type",
        "seed",
    )
    lines = [f"| `{key}` | {config[key]} |" for key in keys if key in config]
    table = "\n".join(["| setting | value |", "|---|---|", *lines])
    return (
        f"## Training\n\nRookWorld {origin['version']}, commit {origin['commit'] or 'unknown'}, "
        f"on {origin['machine']}.\n\n{table}\n"
    )


def evaluation(run: Path, step: int | None) -> str:
    """Before and after on the run's held-out rows; nothing where `step` was not evaluated."""
    lines = list(read_lines(run / "eval.jsonl"))
    measured = [line for line in lines if step is None or line["step"] == step]
    if not measured:
        return ""
    first, last = lines[0], measured[-1]
    rows = [
        f"| {name} | {estimate(first[name])} | {estimate(last[name])} | {last[name]['n']} |"
        for name in headline_metrics()
        if name in first and name in last
    ]
    head = ["| metric | before | after | rows |", "|---|---|---|---|"]
    return "## Evaluation\n\nHeld-out rows, 95 % intervals.\n\n" + "\n".join([*head, *rows]) + "\n"


def estimate(one: dict[str, Any]) -> str:
    return f"{one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"
