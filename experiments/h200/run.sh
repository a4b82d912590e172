#!/usr/bin/env bash
# One call on a machine with GPUs and no network; see README.md. In the repository's root:
#     run.sh SECONDS DIRECTORY GPU=CELLS…, for example 0=wave@2.0:s0,samples@2.0:s0 1=auto:s0
# PROGRAM=engines.py and PROGRAM=trainer.py take the GPUs in one argument: run.sh 570 $OUT 0,1
# It needs an SGLang 0.5.17 for this machine's Python and torch in .gpu/*.tar.xz, and may have more
# in .gpu/wheels/. The cells continue when a call ends; the next call waits for them and copies their
# results. LAST is the Unix time by which everything is over, CODE the commit for the results, and
# ARGUMENTS are more for cells.py. On a machine without a GPU, CPU is the Python of a server that
# runs there.
set -uo pipefail
until=$(($(date +%s) + $1)) out=$2
shift 2
code=$(cd "$(dirname "$0")/../.." && pwd)
program=${PROGRAM:-cells.py}
work=${WORK:-/dev/shm/${program%.py}}
mkdir -p "$work" "$out"
gpu=none
if [ -z "${CPU:-}" ]; then
  . "$code/experiments/h200/environment.sh"
  gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
fi
each=$(($(nproc --all) / $#)) place=0
for list in "$@"; do
  gpus=${list%%=*} first=$((place * each))
  name=${gpus//,/-}
  place=$((place + 1))
  [ -e "$work/$name.pid" ] && continue
  CUDA_VISIBLE_DEVICES=$gpus setsid taskset -c "$first-$((first + each - 1))" \
    "${PYTHON:-python3}" "$code/experiments/h200/$program" --out "$work/$name" --list "$list" \
    --until "${LAST:-$until}" --code "${CODE:-}" --gpu "$gpu" \
    ${CPU:+--cpu --server-python "$CPU"} ${ARGUMENTS:-} >> "$work/$name.log" 2>&1 < /dev/null &
  echo $! > "$work/$name.pid"
done
running() {
  for pid in "$work"/*.pid; do kill -0 "$(cat "$pid")" 2> "$work/kill.txt" && return; done
  false
}
while [ "$(date +%s)" -lt "$until" ] && running; do
  sleep 1
done
for folder in "$work"/[0-9]*/; do
  name=$(basename "$folder")
  cat "$folder"/*.jsonl > "$out/${program%.py}-$name.jsonl"
  for log in "$folder"*/server.log; do
    kind=$(basename "$(dirname "$log")")
    grep -hE "Decode batch|Prefill batch" "$log" | gzip -c > "$out/steps-$name-$kind.txt.gz"
  done
done
cat "$work"/*.log | tee "$out/log.txt" | tail -n 40
tail -c 2000 "$work"/*/*/server.log >> "$out/log.txt"
running && echo "cells are still measured: call again" || echo "all lists have ended"
