#!/usr/bin/env bash
# One call on a machine with GPUs and no network; see README.md. In the repository's root:
#     run.sh SECONDS DIRECTORY GPU:KIND=CELLS…, for example 0:moe=sync:1,april-kept:1@170
# It needs an SGLang 0.5.17 for this machine's Python and torch in .gpu/*.tar.xz, and .gpu/wheels/.
# The first call makes the policy of each KIND on the first GPU that has it (SUPERVISED seconds),
# while the servers start. What it starts goes on when a call ends: the next call with the same lists
# only waits and copies, and one with another list begins it when the first one is done. A list whose
# trainer dies is begun again, and its cell goes on. LAST is the Unix time by which everything is
# over, CODE the commit for the results, MORE further arguments of mixture.py. KILLS=GPU kills the
# trainer of that GPU after half of the call, once. Where something else runs on the other GPUs,
# LISTS is the number of all lists, of which these are the last.
set -uo pipefail
began=$(date +%s) until=$(($(date +%s) + $1)) out=$2
shift 2
code=$(cd "$(dirname "$0")/../.." && pwd)
work=${WORK:-/dev/shm/larger}
mkdir -p "$work" "$out"
. "$code/experiments/h200/environment.sh"
export PYTHONPATH=$PYTHONPATH:$code/experiments/learning_moe
here=$code/experiments/learning_moe
echo "unpacked after $(($(date +%s) - began)) s"
[ -e "$work/last" ] && [ -z "${LAST:-}" ] || echo "${LAST:-$until}" > "$work/last"
lists=${LISTS:-$#}
each=$(($(nproc --all) / lists)) place=$((lists - $#))
for list in "$@"; do
  name=${list%%=*} cells=${list#*=} gpu=${list%%:*} first=$((place * each))
  kind=${name#*:}
  place=$((place + 1))
  if mkdir "$work/policy-$kind" 2> "$work/mkdir.txt"; then
    CUDA_VISIBLE_DEVICES=$gpu setsid taskset -c "$first-$((first + each - 1))" \
      python3 "$here/policy.py" "$work/$kind" --kind "$kind" --seconds "${SUPERVISED:-140}" \
      --boots "$work/boots-$kind" > "$work/policy-$kind.log" 2>&1 < /dev/null &
  fi
  [ -e "$work/$gpu.pid" ] && kill -0 "$(cat "$work/$gpu.pid")" 2> "$work/kill.txt" && continue
  [ "$(cat "$work/$gpu.done" 2> "$work/cat.txt")" = "$cells" ] && continue
  CUDA_VISIBLE_DEVICES=$gpu setsid taskset -c "$first-$((first + each - 1))" bash -c "
    until [ -e '$work/boots-$kind' ]; do sleep 0.2; done
    for again in 1 2 3 4; do
      python3 '$here/mixture.py' --kind $kind --out '$work/$gpu' --work '$work/$gpu' --name $gpu \
        --model '$work/$kind' --boots '$work/boots-$kind' --dtype bfloat16 --stays --probe \
        --until $(cat "$work/last") --code '${CODE:-}' --cells '$cells' ${MORE:-} \
        && echo '$cells' > '$work/$gpu.done' && break
      sleep 1
    done" >> "$work/$gpu.log" 2>&1 < /dev/null &
  echo $! > "$work/$gpu.pid"
done
running() { for pid in "$work"/*.pid; do kill -0 "$(cat "$pid")" 2> "$work/kill.txt" && return; done; false; }
half=$(((began + until) / 2))
while [ "$(date +%s)" -lt "$until" ] && running; do
  if [ -n "${KILLS:-}" ] && [ "$(date +%s)" -gt "$half" ]; then
    kill -KILL "$(pgrep -o -s "$(cat "$work/$KILLS.pid")" python3)" && echo "killed $KILLS"
    KILLS=
  fi
  sleep 1
done
for log in "$work"/policy-*.log; do echo "== $log"; tail -n 4 "$log"; done
for log in "$work"/[0-9].log; do echo "== $log"; tail -n "${LINES_OF_LOG:-14}" "$log" | cut -c 1-600; done
for folder in "$work"/[0-9]; do
  gzip -c "$folder"/*.jsonl > "$out/cells-${folder##*/}.jsonl.gz"
  tail -n 5 "$folder"/*/log.jsonl | cut -c 1-700
done
cat "$work"/policy-*.log > "$out/policies.txt"
tail -c 4000 "$work"/*/server.log > "$out/server.txt"
nvidia-smi --query-gpu=name,memory.used,utilization.gpu --format=csv,noheader | tee "$out/gpu.txt"
echo "ended after $(($(date +%s) - began)) s"
