"""The warm-up of rewards: what is logged beside it, so that it is not taken for progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rookworld.rl.trainer import train
from rookworld.tasks.policy import POLICY
from rookworld.tasks.reward import RewardRules
from tiny_training import metrics_of, no_evaluation, tiny_rows, tiny_settings

pytestmark = pytest.mark.usefixtures("single_thread")


def test_a_verdict_knows_its_reward_at_full_weight() -> None:
    (row,) = POLICY.select(tiny_rows(policy=1))
    gold = POLICY.answer(row, "compact")
    cold = POLICY.verify(row, gold, RewardRules(), None, 0.25)
    whole = POLICY.verify(row, gold, RewardRules())
    assert cold.total < whole.total == cold.at_full_weight == whole.at_full_weight == 1.0
    broken = POLICY.verify(row, "nonsense", RewardRules(), None, 0.25)
    assert broken.at_full_weight == broken.total < 0


def test_the_warm_up_and_the_reward_at_full_weight_are_logged(tmp_path: Path) -> None:
    still: dict[str, Any] = {"lr": 0.0, "flat_tries": 0, "steps": 3, "save_every": 3}
    settings = tiny_settings(Path("nano"), tmp_path / "a", reward_warmup_steps=2, **still)
    train(settings, tiny_rows(), no_evaluation)
    lines = metrics_of(tmp_path / "a")
    assert [line["reward/warmup"] for line in lines] == [0.0, 0.5, 1.0]
    means = [(line["reward/mean"], line["reward/at_full_weight"]) for line in lines]
    assert all(mean < whole for mean, whole in means[:2])
    assert means[2][0] == means[2][1]
    log = (tmp_path / "a" / "train.log").read_text()
    assert log.count("at full weight)") == 2


def test_without_a_warm_up_nothing_is_said_of_it(warm_folder: Path, tmp_path: Path) -> None:
    train(tiny_settings(warm_folder, tmp_path, steps=1), tiny_rows(), no_evaluation)
    (line,) = metrics_of(tmp_path)
    assert not {"reward/warmup", "reward/at_full_weight"} & set(line)
