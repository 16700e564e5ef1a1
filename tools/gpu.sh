#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All that only a GPU can tell: tests/gpu on it, the same under compute-sanitizer, the benchmark.
# `make gpu` calls it. Nothing is fetched where all packages are there, vLLM is not needed, and
# the native I/O core neither: threads do the I/O where it is not built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/need_packages.sh

python=${1:?usage: tools/gpu.sh PYTHON}
out=build/bench
export PYTHONPATH="$PWD:$PWD/bench${PYTHONPATH:+:$PYTHONPATH}"

[ -e /dev/nvidiactl ] || fail "make gpu needs an NVIDIA GPU and its driver; there is none here"

missing() {
    "$python" - <<'PY'
import importlib.util as util
wanted = ("numpy", "pytest", "pydantic", "crc32c", "rich", "typer", "torch",
          "cuda.bindings", "cuda.core", "pynvml", "hypothesis", "matplotlib")
def there(name):
    try:
        return util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
print(" ".join(name for name in wanted if not there(name)))
PY
}

if [ -n "$(missing)" ]; then
    echo "gpu: installing the extras cuda, dev and bench; missing: $(missing)"
    "$python" -m pip install --quiet ".[cuda,dev,bench]" || true
fi
left=$(missing)
case " $left " in
*" numpy "* | *" pytest "* | *" torch "* | *" cuda.bindings "* | *" cuda.core "* | *" rich "* | *" typer "*)
    fail "these Python packages are missing: $left; install them for $python" ;;
esac
[ -z "$left" ] || echo "gpu: without $left: what needs them is skipped"

mkdir -p "$out"
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current \
    --format=csv,noheader

# Without pytest-timeout the project's own settings are an error.
options=(--import-mode=importlib -p no:cacheprovider -ra)
"$python" -c 'import pytest_timeout' 2>/dev/null || options+=(-c /dev/null --rootdir "$PWD")

echo "gpu: tests/gpu, each on the GPU"
"$python" -m pytest "${options[@]}" tests/gpu -m gpu --junitxml "$out/gpu-tests.xml"

if sanitizer=$(command -v compute-sanitizer); then
    echo "gpu: the copies under compute-sanitizer"
    "$sanitizer" --tool memcheck --error-exitcode 9 --target-processes all \
        "$python" -m pytest "${options[@]}" -q tests/gpu/test_copies.py \
        -m gpu -k "contiguous or per_layer or overlapping"
else
    echo "gpu: no compute-sanitizer on PATH (it comes with the CUDA toolkit): not run"
fi

echo "gpu: the benchmark, about five minutes"
plot=(--plot "$out/copy.png")
"$python" -c 'import matplotlib' 2>/dev/null || plot=()
"$python" -m vllm_nvmeof_offload.cli bench copy --json "$out/copy.json" "${plot[@]}"
