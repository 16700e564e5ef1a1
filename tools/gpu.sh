#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All that only a GPU can tell, in parts: tests/gpu on it, the same under compute-sanitizer, real
# vLLM on it, the benchmark of copies, time to first token out of the tiers, models of many kinds.
# `make gpu` calls it.
# Arguments: PYTHON [PART…]
# Nothing is fetched where all packages are there. Without a vLLM for GPUs the parts that need one
# are left out, and said; without the native I/O core threads do the I/O.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/need_packages.sh

python=${1:?usage: tools/gpu.sh PYTHON [PART...]}
shift
parts=("${@:-}")
[ -n "${parts[0]}" ] || parts=(copies sanitizer engine bench ttft shapes)
out=build/bench
# What is installed comes first: it may have the native core, which a bare checkout has not.
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD:$PWD/bench"
# The Makefile says `cpu` to everything else.
unset VLLM_TARGET_DEVICE

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

need_python_packages() {
    if [ -n "$(missing)" ]; then
        echo "gpu: installing the extras cuda, dev and bench; missing: $(missing)"
        "$python" -m pip install --quiet ".[cuda,dev,bench]" || true
    fi
    local left
    left=$(missing)
    case " $left " in
    *" numpy "* | *" pytest "* | *" torch "* | *" cuda.bindings "* | *" cuda.core "* | *" rich "* | *" typer "*)
        fail "these Python packages are missing: $left; install them for $python" ;;
    esac
    [ -z "$left" ] || echo "gpu: without $left: what needs them is skipped"
}

# A vLLM whose engine is one for GPUs, with our plugin installed beside it.
has_engine() {
    "$python" - <<'PY'
import sys
from importlib import metadata
try:
    version = metadata.version("vllm")
except metadata.PackageNotFoundError:
    sys.exit("gpu: no vLLM here: its engine is left out")
if "cpu" in version:
    sys.exit(f"gpu: vLLM {version} is a build for CPUs: its engine is left out")
plugins = {one.name for one in metadata.entry_points(group="vllm.general_plugins")}
if "nvmeof" not in plugins:
    sys.exit("gpu: vLLM does not see our plugin (pip install . beside it): its engine is left out")
PY
}

# pytest's last words stay in build/bench/gpu-NAME.xml. Without pytest-timeout the project's own
# settings are an error.
run_tests() {
    local name=$1 settings=()
    shift
    "$python" -c 'import pytest_timeout' 2>/dev/null ||
        settings=(-c /dev/null --rootdir "$PWD" -m "not soak")
    "$python" -P -m pytest --import-mode=importlib -p no:cacheprovider -ra "${settings[@]}" \
        --junitxml "$out/gpu-$name.xml" "$@"
}

copies() {
    run_tests copies tests/gpu -m gpu
}

sanitizer() {
    local tool
    if ! tool=$(command -v compute-sanitizer); then
        echo "gpu: no compute-sanitizer on PATH (it comes with the CUDA toolkit): not run"
        return
    fi
    "$tool" --tool memcheck --error-exitcode 9 --target-processes all \
        "$python" -P -m pytest --import-mode=importlib -p no:cacheprovider -q -c /dev/null \
        --rootdir "$PWD" tests/gpu/test_copies.py \
        -m gpu -k "contiguous or per_layer or overlapping"
}

# The end-to-end tests go by the engine that this vLLM has; those marked gpu are of no other.
engine() {
    has_engine || return 0
    local status=0
    run_tests engine tests/e2e/shapes/test_on_gpu.py \
        tests/e2e/shapes/test_failing_reads.py || status=1
    run_tests server tests/e2e/test_tokens.py tests/e2e/test_preempt.py \
        tests/e2e/test_faults.py || status=1
    return $status
}

# Adapters, images, drafts, FP8, other block sizes: some thirty engines.
shapes() {
    has_engine || return 0
    run_tests shapes tests/e2e/shapes/test_answers.py tests/e2e/shapes/test_weights.py \
        tests/e2e/shapes/test_hash_seeds.py
}

bench() {
    local plot=(--plot "$out/copy.png")
    "$python" -c 'import matplotlib' 2>/dev/null || plot=()
    "$python" -P -m vllm_nvmeof_offload.cli bench copy --json "$out/copy.json" "${plot[@]}"
}

ttft() {
    has_engine || return 0
    local plot=(--plot "$out/ttft-gpu.png")
    "$python" -c 'import matplotlib' 2>/dev/null || plot=()
    "$python" -P -m vllm_nvmeof_offload.cli bench ttft --lengths 1024,4096,16384,32768 --rounds 3 \
        --arms none,full:dma,full:kernel,pool:dma,pool:kernel,peer_full,peer \
        --server-args "${GPU_SERVER_ARGS:-}" --json "$out/ttft-gpu.json" "${plot[@]}"
}

need_python_packages
mkdir -p "$out"
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current \
    --format=csv,noheader
failed=()
for part in "${parts[@]}"; do
    declare -F "$part" >/dev/null ||
        fail "no part $part; there are copies, sanitizer, engine, bench, ttft, shapes"
    began=$SECONDS
    echo "gpu: $part"
    "$part" || failed+=("$part") # the others run all the same
    echo "gpu: $part took $((SECONDS - began)) s"
done
[ "${#failed[@]}" = 0 ] || fail "failed: ${failed[*]}"
