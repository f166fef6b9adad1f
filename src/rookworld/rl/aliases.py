"""What other trainers call our settings, and what to do where we have none of that name.

A name stands in `ALIASES` only if it means exactly our setting, in our unit: a batch counted in
answers is not one counted in prompts. What differs is in `ADVICE`, so that nobody is sent to a flag
whose name merely looks alike. Names: TRL, OpenRLHF, verl, and RookWorld's earlier scripts.
"""

from __future__ import annotations

_NAMES = {
    "lr": "learning_rate actor_learning_rate",
    "kl_coef": "beta init_kl_coef kl_loss_coef kl_coeff",
    "k_samples": "num_generations group_size n_samples_per_prompt rollout_n n_samples gens",
    "batch_size": "batch_positions rollout_batch_size",
    "steps": "max_steps num_steps num_train_steps total_training_steps train_steps",
    "out": "output_dir save_path ckpt_path default_local_dir checkpoint_dir",
    "model": "model_name_or_path model_name model_path pretrain",
    "data": "dataset_name dataset prompt_data train_files",
    "held_out": "eval_dataset val_files",
    "clip_range": "epsilon eps_clip clip_ratio cliprange",
    "clip_range_high": "epsilon_high eps_clip_high clip_ratio_high",
    "max_new_tokens": "max_completion_length generate_max_len max_response_length",
    "eval_every": "eval_steps eval_freq test_freq",
    "save_every": "save_steps save_freq checkpoint_every",
    "keep": "save_total_limit max_ckpt_num",
    "log_dir": "logging_dir tensorboard_dir",
    "updates_per_rollout": "num_iterations ppo_epochs",
    "clip_norm": "max_grad_norm max_norm grad_clip grad_clip_norm",
    "lr_warmup_steps": "warmup_steps num_warmup_steps",
    "lr_schedule": "lr_scheduler_type lr_scheduler",
    "adam_eps": "adam_epsilon",
    "entropy_coef": "entropy_coeff entropy_loss_coef",
    "gae_lambda": "lambd lam",
    "gae": "use_gae",
    "target_kl": "kl_target",
    "adaptive_kl": "beta_adapt",
    "kl_warmup_steps": "beta_warmup_steps",
    "recompute": "gradient_checkpointing",
    "overwrite": "overwrite_output_dir",
    "resume": "auto_resume",
    "seed": "data_seed",
    "score_workers": "num_workers dataloader_num_workers",
}

ALIASES: dict[str, str] = {
    other: name for name, others in _NAMES.items() for other in others.split()
}
"""Another trainer's name -> the setting that it means."""

IGNORED: dict[str, str] = {
    **dict.fromkeys(
        ("compile", "torch_compile", "use_torch_compile"),
        "the kernels that it would replace are faster",
    ),
    **dict.fromkeys(
        ("bf16", "mixed_precision"), "on CUDA passes are bfloat16 unless --dtype says otherwise"
    ),
    "tensorboard": "curves are written wherever TensorBoard is installed",
    "recovery_mode": "the guard is always there",
    "use_dataset": "prompts always come from --data",
    "disable_dropout": "there is no dropout",
}
"""A switch that is accepted and does nothing -> why."""

_EPOCHS = "prompts never end here; --steps counts updates"
_CUTS = (
    "a step is cut to fit the memory, and its gradient is the same however it is cut: --memory, "
    "or --micro-tokens for the tokens of a pass"
)
_ANSWERS = (
    "it counts answers; --batch-size counts the prompts of a step, --k-samples the answers to each"
)
_WHOLE = "prompts are never cut; what is longer than the model's context is refused"
_ENGINE = "--judge stockfish --engine PATH; without --judge the rows' labels judge"
_ROWS = "every row of --data is drawn from; give a file with fewer rows (`rookworld data import`)"
_RESUME = "--out RUN --resume goes on from the newest whole checkpoint of a run"
_KL = "--kl-type forward, reverse, symmetric, k2, k3 or k1_reward; --help-all has the formulas"
_SAMPLER = "the sampler is built in, and follows the policy at every step"

ADVICE: dict[str, str] = {
    **dict.fromkeys(
        ("epochs", "num_epochs", "num_train_epochs", "total_epochs", "max_epochs", "num_episodes"),
        _EPOCHS,
    ),
    **dict.fromkeys(
        ("per_device_train_batch_size", "train_batch_size", "generation_batch_size"), _ANSWERS
    ),
    **dict.fromkeys(
        (
            *("gradient_accumulation_steps", "grad_accum_steps", "ga", "micro_train_batch_size"),
            *("micro_rollout_batch_size", "ppo_micro_batch_size_per_gpu", "steps_per_generation"),
        ),
        _CUTS,
    ),
    "ppo_mini_batch_size": "a step is one update of the whole batch; --updates-per-rollout "
    "goes over it again",
    **dict.fromkeys(("max_prompt_length", "prompt_max_len", "max_length"), _WHOLE),
    **dict.fromkeys(("stockfish_path", "stockfish"), _ENGINE),
    **dict.fromkeys(
        ("stockfish_time", "depth"), "--nodes N: searches cost the same on every machine"
    ),
    **dict.fromkeys(("n_train_samples", "dataset_size", "max_samples"), _ROWS),
    "n_eval_samples": "--eval-policy-rows and --eval-environment-rows",
    **dict.fromkeys(("resume_from_checkpoint", "load_checkpoint"), _RESUME),
    "new_run": "a run is new unless --resume is given; --overwrite deletes what is in --out",
    "run_name": "--out names the run",
    **dict.fromkeys(("kl_estimator", "kl_loss_type", "use_kl_loss", "use_kl_in_reward"), _KL),
    "kl_horizon": "--adaptive-kl moves the weight by half at a time, between --kl-coef-min and "
    "--kl-coef-max",
    **dict.fromkeys(
        ("use_vllm", "vllm_mode", "vllm_num_engines", "tensor_parallel_size"), _SAMPLER
    ),
    **dict.fromkeys(
        ("loss_type", "loss_agg_mode"), "--loss token (dapo elsewhere), grpo, dr_grpo, gspo, cispo"
    ),
    "importance_sampling_level": "--loss gspo for whole answers, the others for tokens",
    "scale_rewards": "--advantage-scale group, batch or none",
    **dict.fromkeys(
        ("advantage_estimator", "adv_estimator"),
        "--baseline-type group_mean, rloo, ema or adaptive, or --gae for a value head",
    ),
    **dict.fromkeys(
        ("critic_learning_rate", "value_loss_coef", "vf_coef"),
        "--gae has a value head with a rate and a loss of its own, which the policy never feels",
    ),
    "ema_alpha": "--baseline-type ema or adaptive; the pace of the running mean is fixed",
    **dict.fromkeys(
        ("eps_clip_low", "epsilon_low", "clip_ratio_low"),
        "--clip-range is the lower side, and --clip-range-high the upper one",
    ),
    "delta": "--loss cispo clips the weight itself; there is no second clip",
    "min_p": "--top-p or --top-k",
    "repetition_penalty": "--top-p or --top-k, which the ratios know of",
    "warmup_ratio": "--lr-warmup-steps counts steps",
    **dict.fromkeys(("fp16", "float16"), "--dtype bfloat16; float16 would underflow"),
    **dict.fromkeys(("report_to", "use_tensorboard"), "--log-dir for TensorBoard, --wandb for W&B"),
    **dict.fromkeys(("use_wandb", "wandb_project"), "--wandb"),
    **dict.fromkeys(
        ("logging_steps", "log_freq", "log_every"),
        "every step is logged; --sample-every for sample answers",
    ),
    **dict.fromkeys(("sync_ref_model", "ref_model_sync_steps"), "--ref-sync-every N"),
    "mask_truncated_completions": "an answer that is cut off gets the reward of a malformed one",
    **dict.fromkeys(
        ("num_processes", "num_gpus", "n_gpus_per_node"),
        "torchrun --nproc-per-node N -m rookworld train …",
    ),
    **dict.fromkeys(("fsdp", "zero_stage", "deepspeed"), "--shard"),
    "stable": "--preset stable",
    **dict.fromkeys(("overfit_single_batch", "overfit_one_batch"), "`rookworld overfit`"),
    "task_type": "--mix-env-ratio 0 for P alone, 1 for A alone",
    "task_conditional_gen": "--p-temperature, --p-top-p, --a-temperature and --a-top-p are enough",
    "max_new_tokens_env": "--max-new-tokens for both tasks; without it each gets what it needs",
    "no_dataset": "prompts come from --data; `rookworld data generate` makes rows of one's own",
    "n_parallel_games": "prompts come from --data; `rookworld data generate` plays games for rows",
    "compile_mode": "nothing is compiled; kernels and CUDA graphs are built in",
    "save_eval_samples": "answers to fixed held-out rows are in the run's probes.jsonl",
    "debug": "the run's train.log, events.jsonl and rollouts.jsonl have it all",
    **dict.fromkeys(
        ("reward_func", "reward_funcs", "reward_model"),
        "rewards are in tasks/reward.py (docs/rewards.md); --p-weights weighs the parts",
    ),
    "reward_weights": "--p-weights PART WEIGHT …",
}
"""A name that no setting of ours means -> what does what it is for, or why nothing does."""
