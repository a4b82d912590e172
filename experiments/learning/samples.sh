#!/usr/bin/env bash
# Groups against samples, one call on a machine with GPUs and no network; see README.md. In the
# repository's root:
#     samples.sh SECONDS DIRECTORY GPU=CELLS…, for example 0=april-kept:1,samples:1 1=samples-1.5:1
# It needs .gpu/ as run.sh does. Each GPU has one server and one trainer, so that the seconds of its
# cells compare. CODE is the commit for the results. On a machine without a GPU, CPU is the Python of
# a server that runs there, and ARGUMENTS are more for samples.py.
set -uo pipefail
started=$(date +%s)
seconds=$1 out=$2
shift 2
code=$(cd "$(dirname "$0")/../.." && pwd)
work=${WORK:-/dev/shm/samples}
mkdir -p "$work" "$out"
export PYTHONPATH=$code:$code/examples/grpo
more=()
if [ -z "${CPU:-}" ]; then
  . "$code/experiments/h200/environment.sh"
else
  export LEARNING_CPU_STAND_INS=1
  more=(--cpu --server-python "$CPU" --server-path "$code/tests/sglang")
fi
each=$(($(nproc --all) / $#)) place=0 pids=()
for list in "$@"; do
  gpu=${list%%=*} first=$((place * each))
  place=$((place + 1))
  mkdir -p "$work/$gpu"
  CUDA_VISIBLE_DEVICES=$gpu timeout -s KILL $((seconds - ($(date +%s) - started))) \
    taskset -c "$first-$((first + each - 1))" \
    "${PYTHON:-python3}" "$code/experiments/learning/samples.py" --out "$out" --work "$work/$gpu" \
    --name "samples-$gpu" --cells "${list#*=}" --seconds 36 --evaluations 6 --code "${CODE:-}" \
    --until $((started + seconds)) "${more[@]}" ${ARGUMENTS:-} > "$work/$gpu.log" 2>&1 &
  pids+=($!)
done
wait "${pids[@]}"
tail -n 30 "$work"/*.log | tee "$out/log.txt"
tail -c 2000 "$work"/*/server.log > "$out/server.txt"
echo "ended after $(($(date +%s) - started)) s"
