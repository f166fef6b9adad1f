"""Settings by name: `--preset NAME`. A TOML file and flags win over them."""

from __future__ import annotations

from typing import Any

PRETRAIN_PRESETS: dict[str, dict[str, Any]] = {
    "nano": {"repeat_weight": 1.0},
    "small": {"n_layer": 8, "n_embd": 512, "n_head": 16, "repeat_weight": 1.0},
    "gpt2-124m": {
        "tokenizer": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "n_positions": 1024,
        "optimizer": "adamw",
        "lr": 6e-4,
        "lr_other": 6e-4,
        "lr_final": 0.1,
        "batch_size": 512,
        "flip": False,
        "mirror": False,
        "hard_share": 1.0,
        "first_move_weight": 1.0,
        "other_move_weight": 1.0,
        "evaluation_weight": 1.0,
        "marker_weight": 1.0,
        "state_weight": 1.0,
    },
}
"""For `rookworld pretrain`: shapes and recipes."""

TRAIN_PRESETS: dict[str, dict[str, Any]] = {
    "plain": {},
    "demo": {
        "batch_size": 16,
        "steps": 80,
        "lr": 4e-5,
        "trained": "blocks",
        "kl_coef": 1.0,
        "credit": "auto",
        "flat_tries": 0,
        "eval_every": 0,
        "eval_policy_rows": 600,
        "eval_mates": 1000,
        "dtype": "fastest",
    },
    "mini": {
        "batch_size": 8,
        "k_samples": 8,
        "clip_range": 0.2,
        "clip_range_high": 0.2,
        "kl_coef": 0.02,
        "kl_type": "forward",
        "adaptive_kl": True,
        "gae": True,
        "lr": 1e-5,
        "max_new_tokens": 144,
    },
    "stable": {"lr": 1e-6, "clip_range": 0.1, "kl_coef": 0.001},
    "train-sh": {
        "lr": 1e-5,
        "clip_range": 0.1,
        "kl_coef": 0.01,
        "kl_warmup_steps": 100,
        "kl_warmup_factor": 0.1,
        "kl_divergence_threshold": 50.0,
        "reward_warmup_steps": 100,
        "mix_env_ratio": 0.2,
    },
    "overfit": {
        "lr": 2e-6,
        "k_samples": 12,
        "entropy_coef": 0.005,
        "kl_coef": 0.005,
        "kl_warmup_steps": 20,
        "kl_warmup_factor": 0.0,
        "advantage_scale": "group",
        "advantage_std_floor": 0.05,
        "advantage_clip": 2.0,
    },
    "h200": {
        "batch_size": 64,
        "k_samples": 16,
        "steps": 2000,
        "lr": 3e-5,
        "lr_warmup_steps": 20,
        "micro_tokens": 131_072,
        "eval_every": 250,
        "save_every": 500,
        "eval_policy_rows": 2000,
        "eval_environment_rows": 1000,
        "eval_mates": 1000,
    },
}
"""For `rookworld train`, `check`, `overfit` and `inspect`; written out in `configs/NAME.toml`."""
