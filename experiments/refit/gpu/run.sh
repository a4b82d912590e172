#!/usr/bin/env bash
# Measure on a machine with GPUs and no network; see README.md. Run it in the repository's root:
#     bash experiments/refit/gpu/run.sh DIRECTORY
# It needs .gpu/sglang.tar.xz (an SGLang for this machine's Python and torch) and .gpu/wheels/.
set -uo pipefail
export MEASURE_STARTED=${MEASURE_STARTED:-$(date +%s)}
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
root=$(cd "$(dirname "$0")/../../.." && pwd)
site=$(mktemp -d)
exec > >(tee "$out/log.txt") 2>&1
tar -xJf "$root/.gpu/sglang.tar.xz" -C "$site" || exit 1
for wheel in "$root"/.gpu/wheels/*.whl; do
  python3 -m zipfile -e "$wheel" "$site" || exit 1
done
echo "unpacked after $(($(date +%s) - MEASURE_STARTED)) s"
export PYTHONPATH=$site:$root PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export SGLANG_IS_FLASHINFER_AVAILABLE=false TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# Trainer and server have to agree in these, or NCCL waits for ever; multicast stays off.
export NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
python3 -c 'import torch, aiohttp, msgspec, tenacity, yarl, safetensors; print(torch.cuda.device_count(), "GPUs")' || exit 1
cd "$root/experiments/refit/gpu" && python3 "${SCRIPT:-measure.py}" --out "$out" "$@"
rm -rf "$site"
