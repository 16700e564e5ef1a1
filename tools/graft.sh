#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# tools/graft.sh [--diff] VLLM_TREE: copies this package into a vLLM source tree (tools/graft.py).
# PYTHON: the Python that will run that vLLM. This package must be installed there, because it
# provides the compiled modules. Default: the Python of `make setup`.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
default="$root/.venv/bin/python"
[ -x "$default" ] || default=python3
exec "${PYTHON:-$default}" "$root/tools/graft.py" "$@"
