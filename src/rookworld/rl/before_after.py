"""What a training changed on its held-out rows, kept in the run for whoever reads it.

Law: a difference is paired, row by row, with the model before training, and only where the same
rows were judged by the same rules. A resumed run is compared with where it began.
"""

from __future__ import annotations

from rookworld.evaluation.evaluate import Evaluation, load_found, paired, save_found
from rookworld.rl.settings import TrainSettings
from rookworld.runtime.atomic_files import write_json
from rookworld.runtime.config import resolved, short_hash
from rookworld.runtime.run_folder import FIRST_ROWS, PAIRED, Run, finite

_WHICH_ROWS = ("held_out", "eval_policy_rows", "eval_environment_rows", "eval_mates")
_WHICH_RULES = ("reward_", "p_", "a_")


def keep_difference(run: Run, step: int, evaluation: Evaluation, settings: TrainSettings) -> None:
    """The first evaluation row by row; of each later one the difference to it, in `paired.json`."""
    asked = asked_of(settings)
    if step == 0:
        save_found(run.folder / FIRST_ROWS, evaluation, asked)
        return
    before = load_found(run.folder / FIRST_ROWS, asked)
    if before is None:
        (run.folder / PAIRED).unlink(missing_ok=True)
        return
    found = {name: one.to_json() for name, one in paired(before, evaluation).items()}
    write_json(run.folder / PAIRED, finite({"before": 0, "after": step, "metrics": found}))


def asked_of(settings: TrainSettings) -> str:
    """Eight characters that are equal when the same rows are judged by the same rules."""
    names = resolved(settings)
    kept = [name for name in names if name in _WHICH_ROWS or name.startswith(_WHICH_RULES)]
    return short_hash(settings, ignore=set(names) - set(kept))
