#!/usr/bin/env bash
# One run on a GPU of a machine without network; see README.md. In the repository's root:
#     run.sh SECONDS DIRECTORY WEIGHTS STEPS
# It needs what experiments/h200/run.sh needs, and TRL among .gpu/wheels/. Server and trainer share
# the GPU. After SECONDS both end; what was trained until then is in DIRECTORY.
set -uo pipefail
until=$(($(date +%s) + $1)) out=$2 weights=$3 steps=$4
root=$(cd "$(dirname "$0")/../.." && pwd) code=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out"
. "$root/experiments/h200/environment.sh"
mkdir "$code/tests"
cp -r "$root/tests/__init__.py" "$root/tests/support" "$code/tests"
export TRL_EXPERIMENTAL_SILENCE=1
model=$(mktemp -d)/model port=$((30000 + RANDOM % 2000))
python3 "$code/experiments/trl_gpu/run.py" "$model"
setsid python3 -m sglang.launch_server --model-path "$model" --skip-tokenizer-init \
  --host 127.0.0.1 --port "$port" --dtype bfloat16 --weight-version 0 --attention-backend triton \
  --sampling-backend pytorch --grammar-backend none --cuda-graph-backend-prefill disabled \
  --cuda-graph-max-bs-decode 512 --max-running-requests 512 --max-total-tokens 262144 \
  --mem-fraction-static 0.8 --stream-interval 64 --skip-server-warmup \
  --incremental-streaming-output --random-seed 1 > "$out/server.log" 2>&1 < /dev/null &
server=$!
ready() {
  python3 -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/health_generate', timeout=5)" \
    2> "$out/ready.txt"
}
until ready || [ "$(date +%s)" -ge "$until" ]; do sleep 1; done
echo "a server after $SECONDS s"
timeout $((until - $(date +%s))) python3 "$code/experiments/trl_gpu/run.py" "$model" \
  --engine "http://127.0.0.1:$port" --weights "$weights" --steps "$steps" --out "$out"
echo "ended with $? after $SECONDS s"
kill -KILL -- "-$server"
