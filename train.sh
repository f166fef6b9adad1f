#!/usr/bin/env bash
# GRPO by environment variables; whatever is not set keeps its default. Goes on with the run that is
# in OUT; OVERWRITE=1 starts over.
#
#   STEPS=5 BATCH_POSITIONS=4 GROUP_SIZE=2 LR=1e-5 CLIP_RANGE=0.1 ./train.sh [more flags]
set -euo pipefail
cd "$(dirname "$0")"

flags=(--preset train-sh --out "${OUT:-runs/train-sh}")
if [ "${OVERWRITE:-0}" = 1 ]; then flags+=(--overwrite); else flags+=(--resume); fi
add() { if [ -n "${2:-}" ]; then flags+=("$1" "$2"); fi; }

add --model "${MODEL:-}"
if [ -n "${DATA:-}" ]; then
    set -f  # words are sources; a * in one is not the shell's
    # shellcheck disable=SC2206
    flags+=(--data $DATA)
    set +f
fi
add --steps "${STEPS:-}"
add --batch-size "${BATCH_POSITIONS:-${BATCH_SIZE:-}}"
add --k-samples "${GROUP_SIZE:-${K_SAMPLES:-}}"
add --lr "${LR:-}"
add --clip-range "${CLIP_RANGE:-}"
add --clip-range-high "${CLIP_RANGE:-}"  # by itself 0.2 would be the default, with 0.28 above
add --kl-coef "${KL_COEF:-}"
add --kl-divergence-threshold "${KL_DIVERGENCE_THRESHOLD:-}"
add --kl-warmup-steps "${KL_WARMUP_STEPS:-}"
add --kl-warmup-factor "${KL_WARMUP_FACTOR:-}"
add --reward-warmup-steps "${REWARD_WARMUP_STEPS:-}"
add --mix-env-ratio "${MIX_ENV_RATIO:-}"
add --temperature "${TEMPERATURE:-}"
add --seed "${SEED:-}"

rookworld=.venv/bin/rookworld
if [ ! -x "$rookworld" ]; then rookworld=rookworld; fi
exec "$rookworld" train "${flags[@]}" "$@"
