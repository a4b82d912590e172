#!/usr/bin/env bash
# Measure vLLM's transfer on a machine with two GPUs; see README.md. In the root:
#     bash experiments/refit/gpu/transfer.sh DIRECTORY
# It needs .gpu/transfer/ with vllm.tar.xz (vllm_parts.FILES) and the wheels of asyncio-throttle,
# msgspec and tenacity.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
root=$(cd "$(dirname "$0")/../../.." && pwd)
site=$(mktemp -d)
for wheel in "$root"/.gpu/transfer/*.whl; do
  python3 -m zipfile -e "$wheel" "$site" || exit 1
done
export PYTHONPATH=$site:$root PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Multicast stays off; both ends have to agree in the other.
export NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
python3 "$root/experiments/refit/gpu/transfer.py" --out "$out" --parts "$root/.gpu/transfer/vllm.tar.xz" "$@" 2>&1 | tee "$out/log.txt"
rm -rf "$site"
