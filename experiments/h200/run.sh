#!/usr/bin/env bash
# One call on a machine with GPUs and no network; see README.md. In the repository's root:
#     run.sh SECONDS DIRECTORY GPU=CELLS…, for example 0=wave@2.0:s0,samples@2.0:s0 1=auto:s0
# Without CELLS a GPU measures its list of schedules.py, for example: run.sh 570 $OUT 0 1
# It needs an SGLang 0.5.17 for this machine's Python and torch in .gpu/*.tar.xz, and may have more
# in .gpu/wheels/. The cells continue when a call ends; the next call waits for them and copies their
# results. LAST is the Unix time by which everything is over, CODE the commit for the results, and
# ARGUMENTS are more for cells.py. On a machine without a GPU, CPU is the Python of a server that
# runs there.
set -uo pipefail
until=$(($(date +%s) + $1)) out=$2
shift 2
code=$(cd "$(dirname "$0")/../.." && pwd)
work=${WORK:-/dev/shm/h200}
mkdir -p "$work" "$out"
gpu=none
if [ -z "${CPU:-}" ]; then
  . "$code/experiments/h200/environment.sh"
  gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
fi
each=$(($(nproc --all) / $#)) place=0
for list in "$@"; do
  name=${list%%=*} first=$((place * each))
  place=$((place + 1))
  [ -e "$work/$name.pid" ] && continue
  CUDA_VISIBLE_DEVICES=$name setsid taskset -c "$first-$((first + each - 1))" \
    "${PYTHON:-python3}" "$code/experiments/h200/cells.py" --out "$work/$name" --list "$list" \
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
for folder in "$work"/[0-9]; do
  name=${folder##*/}
  cp "$folder/cells.jsonl" "$out/cells-$name.jsonl"
  grep -hE "Decode batch|Prefill batch" "$folder/server.log" | gzip -c > "$out/steps-$name.txt.gz"
done
tail -c 3000 "$work"/*/server.log > "$out/server.txt"
cat "$work"/*.log | tee "$out/log.txt" | tail -n 40
running && echo "cells are still measured: call again" || echo "all lists have ended"
