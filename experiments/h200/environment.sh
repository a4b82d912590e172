# Sourced: unpacks .gpu once to /tmp/site, copies the code, and sets the environment. The next call
# replaces what was carried, under the feet of what stays, so each call runs a copy of its own.
site=/tmp/site
(
  flock 9
  if [ ! -e $site/done ]; then
    mkdir -p $site
    for part in .gpu/*.tar.xz; do tar -xJf "$part" -C $site & done
    wait
    for wheel in .gpu/wheels/*.whl; do python3 -m zipfile -e "$wheel" $site || exit 1; done
    # Otherwise each process of each server compiles what it imports.
    python3 -m compileall -q -j 0 $site > /tmp/compiled.txt
    touch $site/done
  fi
) 9> /tmp/unpacking || exit 1
copy=$(mktemp -d /tmp/code.XXXXXX)
cp -r "$code/aprilsched" "$code/examples" "$code/experiments" "$copy"
code=$copy
export PYTHONPATH=$site:$code:$code/examples/grpo PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export SGLANG_IS_FLASHINFER_AVAILABLE=false TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
