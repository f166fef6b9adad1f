"""The card of an exported model: where it comes from, what it was measured at, how to use it.

Everything on it is read from the run that made the model; what the run does not say is left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rookworld.runtime.embedded import EMBEDDED_MODELS
from rookworld.runtime.run_folder import read_json, read_lines
from rookworld.tasks.registry import headline_metrics, metric_info

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(folder: Path, name: str, parameters: int, style: str) -> str:
    """A README for the model in `folder`."""
    run = run_of(folder)
    parts = [header(name, run, step_of(folder)), f"# {name}\n", about(parameters, style)]
    parts += [usage(name, style)]
    if run is not None:
        parts += [training(run), evaluation(run, step_of(folder))]
    parts.append("## Licence\n\nGPL-3.0-or-later, like RookWorld itself.\n")
    return "\n".join(part for part in parts if part)


def header(name: str, run: Path | None, step: int | None) -> str:
    """What the hub reads: the model it was trained from, the rows, the metrics."""
    lines = [
        *("---", "license: gpl-3.0", "library_name: transformers", "language: en"),
        *("pipeline_tag: text-generation", "tags: [chess, grpo, rookworld]"),
    ]
    if run is not None:
        config = read_json(run / "config.json")
        base = base_of(run)
        lines += [f"base_model: {base}"] if on_hub(base) else []
        rows = [one.split(":")[0] for one in config.get("data", ()) if on_hub(one.split(":")[0])]
        lines += [f"datasets: [{', '.join(dict.fromkeys(rows))}]"] if rows else []
        lines += index(name, run, step, str(config.get("held_out", "")))
    return "\n".join([*lines, "---", ""])


def index(name: str, run: Path, step: int | None, held_out: str) -> list[str]:
    """The held-out metrics as the hub's `model-index`."""
    _, last = before_and_after(run, step)
    values = {one: last.get(one, {}).get("value") for one in headline_metrics()}
    found = {one: float(value) for one, value in values.items() if value is not None}
    if not found:
        return []
    rows = held_out if on_hub(held_out.split(":")[0]) else "rookworld"
    return [
        *("model-index:", f"- name: {name}", "  results:", "  - task:"),
        *("      type: text-generation", "      name: Chess analysis and environment"),
        *("    dataset:", f"      type: {rows}", f'      name: "held-out rows, {held_out}"'),
        "    metrics:",
        *(
            f'    - {{type: {one}, name: "{metric_info(one).label}", value: {number:.4f}}}'
            for one, number in found.items()
        ),
    ]


def base_of(run: Path) -> str:
    """The model that a run began with, or the run before it did; a name, or where it lay."""
    model = str(read_json(run / "config.json").get("model", ""))
    earlier = run_of(Path(model)) if Path(model).is_dir() else None
    return model if earlier is None or earlier == run else base_of(earlier)


def on_hub(name: str) -> bool:
    """Whether a name is one of the hub's, as far as one can tell here."""
    return HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def card_name(folder: Path, out: Path, default: Path) -> str:
    """What a model is called: as the folder it is written to, else as what it was trained in."""
    if out != default:
        return out.name
    run = run_of(folder)
    return f"rookworld-{(run or folder.resolve()).name}"


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


def usage(name: str, style: str) -> str:
    prompt = (
        "P: rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1 M:"
        if style == "compact"
        else "P: rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
    )
    return (
        "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n'
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
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
    base = base_of(run)
    known = f", {EMBEDDED_MODELS[base]}" if base in EMBEDDED_MODELS else ""
    start = f"Trained from `{base}`{known}. " if base else ""
    return (
        f"## Training\n\n{start}RookWorld {origin['version']}, "
        f"commit {origin['commit'] or 'unknown'}, on {origin['machine']}.\n\n{table}\n"
    )


def before_and_after(run: Path, step: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run's first evaluation and that of `step`, by default the last; empty where none was."""
    lines = list(read_lines(run / "eval.jsonl"))
    measured = [line for line in lines if step is None or line["step"] == step]
    return (lines[0], measured[-1]) if measured else ({}, {})


def evaluation(run: Path, step: int | None) -> str:
    """Before and after on the run's held-out rows; nothing where `step` was not evaluated."""
    first, last = before_and_after(run, step)
    if not last:
        return ""
    rows = [
        f"| {metric_info(name).label} (`{name}`) | {estimate(first[name])} "
        f"| {estimate(last[name])} | {last[name]['n']} |"
        for name in headline_metrics()
        if name in first and name in last
    ]
    head = ["| metric | before | after | rows |", "|---|---|---|---|"]
    return "## Evaluation\n\nHeld-out rows, 95 % intervals.\n\n" + "\n".join([*head, *rows]) + "\n"


def estimate(one: dict[str, Any]) -> str:
    return f"{one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"
