#!/usr/bin/env bash
# One call on a machine with two GPUs and no network; see README.md. In the repository's root:
#     run.sh SECONDS DIRECTORY "ARGUMENTS OF campaign.py" "BLOCKS OF ages.py"
# A block is NAME:SEED,SEED:LEARNING_RATE. It needs .gpu/sglang.tar.xz (an SGLang 0.5.17 for this
# machine's Python and torch) and .gpu/wheels/. When the time is over the trainer is killed, and the
# server and ages.py stay; the next call goes on with all three.
set -uo pipefail
began=$(date +%s)
seconds=$1 out=$2 arguments=$3 blocks=$4
code=$(cd "$(dirname "$0")/../.." && pwd)
work=${WORK:-/dev/shm/learning}
site=/tmp/site
mkdir -p "$work" "$out"
if [ ! -e $site/done ]; then
  mkdir -p $site && tar -xJf .gpu/sglang.tar.xz -C $site || exit 1
  for wheel in .gpu/wheels/*.whl; do python3 -m zipfile -e "$wheel" $site || exit 1; done
  cp -r "$code" /tmp/code
  touch $site/done
fi
echo "unpacked after $(($(date +%s) - began)) s"
code=/tmp/code # the next call replaces what was carried, under the feet of what stays
export PYTHONPATH=$site:$code:$code/examples/grpo PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export SGLANG_IS_FLASHINFER_AVAILABLE=false TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
half=$(($(nproc) / 2))
if [ ! -e "$work/ages.pid" ]; then
  CUDA_VISIBLE_DEVICES=1 setsid taskset -c $half-$((2 * half - 1)) bash -c '
    for block in '"$blocks"'; do
      IFS=: read -r name seeds rate <<< "$block"
      python3 '"$code"'/experiments/learning/ages.py --out '"$work"'/ages.jsonl --block $name \
        --seeds ${seeds//,/ } --lr ${rate:-3e-4}
    done; echo blocks done' > "$work/ages.log" 2>&1 < /dev/null &
  echo $! > "$work/ages.pid"
fi
CUDA_VISIBLE_DEVICES=0 timeout -s KILL $((seconds - ($(date +%s) - began))) \
  taskset -c 0-$((half - 1)) python3 $code/experiments/learning/campaign.py --out "$out" \
  --work "$work" --stays --until $((began + seconds)) $arguments
ls "$work"
tail -n 6 "$work/ages.log"
tail -c 2000 "$work/server.log" > "$out/server.txt"
gzip -c "$work/ages.jsonl" > "$out/ages.jsonl.gz"
echo "ended after $(($(date +%s) - began)) s"
