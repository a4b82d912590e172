#!/usr/bin/env bash
# One call on a machine with two GPUs and no network; see README.md. In the repository's root:
#     run.sh SECONDS DIRECTORY "ARGUMENTS OF campaign.py" "BLOCKS OF usefulness.py"
# A block is NAME:SEED,SEED:LEARNING_RATE; with no blocks the other GPU is left alone. GPU and CORES
# say which GPU and cores the campaign takes (0 and the first half). It needs .gpu/sglang.tar.xz (an SGLang 0.5.17 for this
# machine's Python and torch) and .gpu/wheels/. When the time is over the trainer is killed, and the
# server and usefulness.py stay; the next call goes on with all three.
set -uo pipefail
began=$(date +%s)
seconds=$1 out=$2 arguments=$3 blocks=$4
code=$(cd "$(dirname "$0")/../.." && pwd)
work=${WORK:-/dev/shm/learning}
mkdir -p "$work" "$out"
. "$code/experiments/h200/environment.sh"
echo "unpacked after $(($(date +%s) - began)) s"
half=$(($(nproc) / 2))
if [ -n "$blocks" ] && [ ! -e "$work/usefulness.pid" ]; then
  CUDA_VISIBLE_DEVICES=1 setsid taskset -c $half-$((2 * half - 1)) bash -c '
    for block in '"$blocks"'; do
      IFS=: read -r name seeds rate <<< "$block"
      python3 '"$code"'/experiments/learning/usefulness.py --out '"$work"'/usefulness.jsonl --block $name \
        --seeds ${seeds//,/ } --lr ${rate:-3e-4}
    done; echo blocks done' > "$work/usefulness.log" 2>&1 < /dev/null &
  echo $! > "$work/usefulness.pid"
fi
CUDA_VISIBLE_DEVICES=${GPU:-0} timeout -s KILL $((seconds - ($(date +%s) - began))) \
  taskset -c "${CORES:-0-$((half - 1))}" python3 $code/experiments/learning/campaign.py --out "$out" \
  --work "$work" --stays --until $((began + seconds)) $arguments
ls "$work"
tail -c 2000 "$work/server.log" > "$out/server.txt"
if [ -n "$blocks" ]; then
  tail -n 6 "$work/usefulness.log"
  gzip -c "$work/usefulness.jsonl" > "$out/usefulness.jsonl.gz"
fi
echo "ended after $(($(date +%s) - began)) s"
