#!/usr/bin/env bash
# GRPO by environment variables; whatever is not set keeps its default.
#
#   STEPS=5 BATCH_POSITIONS=4 GROUP_SIZE=2 LR=1e-5 CLIP_RANGE=0.1 ./train.sh [more flags]
#
# Starts a new run in OUT, or beside it if there is one: OUT-2, OUT-3, …
# RESUME=1 goes on with the run in OUT, without OUT with the newest. OVERWRITE=1 deletes it first.
# Every variable of RookWorld's earlier scripts is read, or refused with a line (docs/migration.md).
set -euo pipefail
cd "$(dirname "$0")"

refuse() { echo "train.sh: $1" >&2; exit 2; }
# whether the variable of this name says yes; tr, as the bash of macOS knows no ${x,,}
yes() { case "$(echo "${!1:-}" | tr '[:upper:]' '[:lower:]')" in
    1 | true | yes | on) return 0 ;; "" | 0 | false | no | off) return 1 ;; esac
    refuse "$1: ${!1} is neither true nor false"; }
holds_a_run() { [ -s "$1/metrics.jsonl" ] || [ -e "$1/DONE" ]; }

if yes RESUME && yes NEW_RUN; then refuse "RESUME and NEW_RUN exclude each other"; fi
if [ -n "${NEW_RUN:-}" ] && ! yes NEW_RUN; then RESUME=1; fi

asked="${OUT:-${OUTPUT_DIR:-}}"
out="${asked:-runs/train-sh}"
flags=()
if yes RESUME; then
    if [ -z "$asked" ]; then
        for newer in $(ls -td runs/train-sh runs/train-sh-[0-9]* 2>/dev/null || true); do
            if holds_a_run "$newer"; then out="$newer"; break; fi
        done
    fi
    flags+=(--resume)
    if [ -e "$out/config.json" ]; then
        echo "train.sh: going on in $out" >&2
    else
        echo "train.sh: $out: nothing there yet: beginning" >&2
    fi
elif yes OVERWRITE; then
    flags+=(--overwrite)
elif holds_a_run "$out"; then
    number=2
    while [ -e "$out-$number" ]; do number=$((number + 1)); done
    echo "train.sh: $out holds a run; a new one begins in $out-$number (RESUME=1 goes on)" >&2
    out="$out-$number"
fi
# what a run was begun with, --resume takes from the run
if ! yes RESUME || [ ! -e "$out/config.json" ]; then flags=(--preset train-sh ${flags[@]+"${flags[@]}"}); fi
flags+=(--out "$out")

if [ -n "${DATA:-}" ]; then
    set -f  # words are sources; a * in one is not the shell's
    # shellcheck disable=SC2206
    flags+=(--data $DATA)
    set +f
fi

# each is the flag of the same name; `rookworld train` knows what other trainers call its flags
for name in MODEL MODEL_NAME STEPS NUM_EPOCHS BATCH_SIZE BATCH_POSITIONS K_SAMPLES GROUP_SIZE \
    NUM_GENERATIONS LR LEARNING_RATE WARMUP_STEPS MAX_GRAD_NORM CLIP_RANGE CLIP_RANGE_HIGH KL_COEF \
    BETA KL_TYPE TARGET_KL KL_DIVERGENCE_THRESHOLD KL_WARMUP_STEPS KL_WARMUP_FACTOR BASELINE_TYPE \
    ENTROPY_COEF REWARD_WARMUP_STEPS REWARD_SHAPING MIX_ENV_RATIO TEMPERATURE TOP_P TOP_K \
    P_TEMPERATURE P_TOP_P A_TEMPERATURE A_TOP_P MAX_NEW_TOKENS MAX_NEW_TOKENS_ENV \
    MAX_COMPLETION_LENGTH DATASET_SIZE N_TRAIN_SAMPLES EVAL_EVERY EVAL_FREQ EVAL_STEPS SAVE_EVERY \
    SAVE_FREQ SAVE_STEPS LOGGING_STEPS LOG_FREQ LOG_DIR JUDGE SEED DEVICE DTYPE MEMORY; do
    if [ -n "${!name:-}" ]; then
        flags+=("--$(echo "$name" | tr '[:upper:]_' '[:lower:]-')" "${!name}")
        # by itself 0.2 would be the default, with 0.28 above
        if [ "$name" = CLIP_RANGE ] && [ -z "${CLIP_RANGE_HIGH:-}" ]; then
            flags+=(--clip-range-high "$CLIP_RANGE")
        fi
    fi
done
switch() { if [ -n "${!1:-}" ]; then if yes "$1"; then flags+=($2); else flags+=($3); fi; fi; }
switch USE_DATASET --use-dataset --no-dataset
switch USE_TORCH_COMPILE --torch-compile --no-torch-compile
switch USE_BF16 --bf16 "--dtype float32"
if [ -n "${TASK_CONDITIONAL_GEN:-}" ]; then
    echo "train.sh: TASK_CONDITIONAL_GEN does nothing: P_TEMPERATURE, P_TOP_P, A_TEMPERATURE and" \
        "A_TOP_P are enough" >&2
fi

rookworld=.venv/bin/rookworld
if [ ! -x "$rookworld" ]; then rookworld=rookworld; fi
exec "$rookworld" train "${flags[@]}" "$@"
