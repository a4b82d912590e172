#!/usr/bin/env bash
# One call on a machine with one or two GPUs and no network; see README.md. In the repository's root:
#     run.sh SECONDS DIRECTORY "CELLS OF GPU 0" ["CELLS OF GPU 1" [FILE THAT GPU 1 WAITS FOR]]
# It needs .gpu/sglang.tar.xz (an SGLang 0.5.17 for this machine's Python and torch) and .gpu/wheels/.
# What it starts goes on when a call ends. The next call with the same list only waits and copies,
# and one with another list begins it when the first one is done, on the same server. LAST is the
# Unix time by which everything is over, and CODE the commit for the results. REFIT=1 times refits
# from GPU 1 at the end. TP names cells for a server of the 8B shape on both GPUs, after the others,
# and RECV8 cells for a server with --scheduler-recv-interval 8 on GPU 1, after that GPU's others.
# With AGAIN=1 cells in raw/ are measured again.
set -uo pipefail
until=$(($(date +%s) + $1)) out=$2 first=$3 second=${4:-} after=${5:-}
code=$(cd "$(dirname "$0")/../.." && pwd)
work=${WORK:-/dev/shm/h200}
mkdir -p "$work" "$out"
. "$code/experiments/h200/environment.sh"
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
begin() { # name, GPUs, cores, cells, more arguments
  name=$1
  [ "$(cat "$work/$name.cells" 2> "$work/cat.txt")" = "$4" ] && return
  while [ -e "$work/$name.pid" ] && kill -0 "$(cat "$work/$name.pid")" 2> "$work/kill.txt"; do
    sleep 0.2 # The cells of the call before are not done.
  done
  echo "$4" > "$work/$name.cells"
  CUDA_VISIBLE_DEVICES=$2 setsid taskset -c "$3" python3 "$code/experiments/h200/cells.py" \
    --out "$work/$name" --cells "$4" --until "${LAST:-$until}" --code "${CODE:-}" --gpu "$gpu" \
    --stays ${AGAIN:+--again} "${@:5}" >> "$work/$name.log" 2>&1 < /dev/null &
  echo $! > "$work/$name.pid"
}
last=$(($(nproc) - 1))
# GPU 1 first: beginning GPU 0 may wait.
if [ -n "$second" ]; then
  begin 1 1 "$((last / 3 + 1))-$((2 * last / 3))" "$second" --partial ${after:+--after "$after"}
fi
begin 0 0 "0-$((last / 3))" "$first" --nvml --partial --also "$work/1" ${REFIT:+--refit}
if [ -n "${TP:-}" ] && [ ! -e "$work/2.pid" ]; then
  begin 2 0,1 "0-$last" "$TP" --partial --shape 8b --tensor-parallel 2 --replaces "$work/0" "$work/1"
fi
if [ -n "${RECV8:-}" ] && [ ! -e "$work/3.pid" ]; then
  begin 3 1 "$((last / 3 + 1))-$((2 * last / 3))" "$RECV8" --partial --replaces "$work/1" \
    --server-args "--scheduler-recv-interval 8"
fi
# A server that does not start ends the call at once; otherwise both are waited for.
for each in 0 1 2 3; do
  [ -e "$work/$each.pid" ] || continue
  while [ "$(date +%s)" -lt "$until" ] && kill -0 "$(cat "$work/$each.pid")" 2> "$work/kill.txt"; do
    sleep 1
  done
  [ "$each" != 0 ] || grep -q '"cell"' "$work/0/cells.jsonl" || break
done
tail -n 40 "$work"/*.log
for each in 0 1 2 3; do
  [ -e "$work/$each" ] || continue
  cp "$work/$each/cells.jsonl" "$out/cells-$each.jsonl" 2> "$work/cat.txt"
  grep -hE "Decode batch|Prefill batch" "$work/$each/server.log" | gzip -c > "$out/steps-$each.txt.gz"
done
cp "$work/0/refit.jsonl" "$out" 2> "$work/cat.txt"
cat "$work/0/samples.jsonl" 2> "$work/cat.txt" | gzip -c > "$out/samples.jsonl.gz"
tail -c 3000 "$work"/*/server.log > "$out/server.txt"
