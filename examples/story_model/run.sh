#!/usr/bin/env bash
# The whole recipe on a machine with GPUs: bash examples/story_model/run.sh warm | stories | train
#
#   warm     compiles both trainers on toy stories, for the compile cache (WARM_S seconds each, at once)
#   stories  a writer on each GPU for WRITE_S seconds, then the tokenizer and the data
#   train    the 1-bit model on the first half of the GPUs for TRAIN_S seconds, beside it the float one on the rest
#
# TEACHER is SmolLM2's file, OUT where results go, WORK a folder for the rest.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${OUT:=out}" "${WORK:=/tmp/story_model}" "${GPUS:=8}" "${TEACHER:=demo}" "${PYTHON:=python3}"
: "${WARM_S:=150}" "${WRITE_S:=200}" "${TRAIN_S:=200}" "${WRITER:=}" "${TRAINER:=}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0
export JAX_COMPILATION_CACHE_DIR="$WORK/cache" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
here=examples/story_model
half=$(((GPUS + 1) / 2))
first=$(seq -s, 0 $((half - 1)))
rest=$(seq -s, $((half % GPUS)) $((GPUS - 1)))
mkdir -p "$OUT" "$WORK/stories" "$WORK/cache"

# Both trainers at once: $1 is the data, $2 where they write, the rest goes to both.
both() {
  local data=$1 to=$2
  shift 2
  # shellcheck disable=SC2086
  CUDA_VISIBLE_DEVICES=$first $PYTHON $here/train.py train --data "$data" --out "$to" "$@" $TRAINER &
  local one_bit=$! failed=0
  # shellcheck disable=SC2086
  CUDA_VISIBLE_DEVICES=$rest $PYTHON $here/train.py train --data "$data" --out "$to" "$@" $TRAINER --float &
  wait $! || failed=$?
  wait $one_bit || failed=$?
  return $failed
}

case "$1" in
warm)
  $PYTHON $here/prompts.py 4000 > "$WORK/toy.jsonl"
  $PYTHON $here/train.py prepare "$WORK/toy.jsonl" --data "$WORK/toy"
  both "$WORK/toy" "$WORK/toy_out" --seconds "$WARM_S" --save 0
  ;;
stories)
  for ((gpu = 0; gpu < GPUS; gpu++)); do
    # shellcheck disable=SC2086
    CUDA_VISIBLE_DEVICES=$gpu $PYTHON $here/write_stories.py "$WORK/stories/$gpu.jsonl" --model "$TEACHER" \
      --seconds "$WRITE_S" --seed "$gpu" $WRITER > "$WORK/writer$gpu.log" 2>&1 &
    writers[gpu]=$!
  done
  for ((gpu = 0; gpu < GPUS; gpu++)); do
    if ! wait "${writers[gpu]}"; then
      echo "the writer on GPU $gpu failed:" >&2
      tail -n 30 "$WORK/writer$gpu.log" >&2
      exit 1
    fi
  done
  tail -n 1 "$WORK"/writer*.log
  $PYTHON $here/train.py prepare "$WORK"/stories/*.jsonl --data "$WORK/data"
  # As much of what was written as fits into files that come back from a rented machine.
  for file in "$WORK"/stories/*.jsonl; do gzip -kf "$file" & done
  wait
  { cat "$WORK"/stories/*.jsonl.gz || true; } | head -c 45000000 | split -b 15000000 - "$OUT/stories.jsonl.gz."
  cp "$WORK/data/tokenizer.json" "$OUT"
  ;;
train)
  both "$WORK/data" "$OUT" --seconds "$TRAIN_S"
  ;;
*)
  echo "run.sh warm | stories | train" >&2
  exit 2
  ;;
esac
