"""Shapes and recipes of `rookworld pretrain` by name: `--preset NAME`."""

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
    "rookworld-lm": {
        "documents": True,
        "tokenizer": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "n_positions": 1024,
        "steps": 1000,
        "batch_size": 192,
        "micro_tokens": 49_152,
        "lr": 2e-3,
        "lr_other": 1e-3,
        "lr_warmup_steps": 60,
        "weight_decay": 0.05,
        "flip": False,
        "mirror": False,
    },
}
