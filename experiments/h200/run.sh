#!/usr/bin/env bash
# One call on a machine with GPUs and no network; see README.md. In the repository's root:
#     run.sh SECONDS DIRECTORY GPUS=CELLS…, for example 0=april:0:1,auto-default:0:1 1=april:0:1:moe
# It needs an SGLang 0.5.17 for this machine's Python and torch in .gpu/*.tar.xz, and .gpu/wheels/.
# What it starts goes on when a call ends. The next call with the same lists only waits and copies,
# and one with another list begins it when the first one is done. LAST is the Unix time by which
# everything is over, and CODE the commit for the results. REFIT=1 times refits from GPU 1 at the
# end of GPU 0's cells. Where something else runs on
# the other GPUs, LISTS is the number of all lists, of which these are the first. On a machine without
# a GPU, CPU is the Python of a server that runs there.
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
each=$(($(nproc --all) / ${LISTS:-$#})) place=0
for list in "$@"; do
  gpus=${list%%=*} cells=${list#*=} name=${list%%[,=]*} first=$((place * each))
  place=$((place + 1))
  [ "$(cat "$work/$name.cells" 2> "$work/cat.txt")" = "$cells" ] && continue
  while [ -e "$work/$name.pid" ] && kill -0 "$(cat "$work/$name.pid")" 2> "$work/kill.txt"; do
    sleep 0.2 # The cells of the call before are not done.
  done
  echo "$cells" > "$work/$name.cells"
  more=(--partial --stays ${CPU:+--cpu --server-python "$CPU"})
  [ "$name" != 0 ] || more+=(--nvml --also "$work/1" ${REFIT:+--refit})
  CUDA_VISIBLE_DEVICES=$gpus setsid taskset -c "$first-$((first + each - 1))" \
    python3 "$code/experiments/h200/cells.py" --out "$work/$name" --cells "$cells" \
    --until "${LAST:-$until}" --code "${CODE:-}" --gpu "$gpu" "${more[@]}" \
    >> "$work/$name.log" 2>&1 < /dev/null &
  echo $! > "$work/$name.pid"
done
running() { for pid in "$work"/*.pid; do kill -0 "$(cat "$pid")" 2> "$work/kill.txt" && return; done; false; }
while [ "$(date +%s)" -lt "$until" ] && running; do
  sleep 1
done
tail -n 40 "$work"/*.log
for folder in "$work"/[0-9]; do
  name=${folder##*/}
  cp "$folder/cells.jsonl" "$out/cells-$name.jsonl" 2> "$work/cat.txt"
  for log in "$folder"/server-*.log; do
    grep -hE "Decode batch|Prefill batch" "$log" | gzip -c > "$out/steps-$name-$(basename "$log" .log).txt.gz"
  done
done
cp "$work/0/refit.jsonl" "$out" 2> "$work/cat.txt"
cat "$work/0/samples.jsonl" 2> "$work/cat.txt" | gzip -c > "$out/samples.jsonl.gz"
tail -c 3000 "$work"/*/server-*.log > "$out/server.txt"
