#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks the targets, then serves a model with its KV cache on them.
#
#   TARGETS=/mnt/nvme0:/mnt/nvme1 STAGING_GIB=64 POOL_BYTES=4TiB examples/02_serve.sh MODEL [vllm's options]
#
# TARGETS: directories on mounted namespaces, separated by ":".
# STAGING_GIB: pinned memory over all ranks. POOL_BYTES: size over all ranks and targets.
set -euo pipefail

model=${1:?usage: TARGETS=/mnt/nvme0 examples/02_serve.sh MODEL [options of vllm serve]}
shift
: "${TARGETS:?name the directories of the pool, such as TARGETS=/mnt/nvme0:/mnt/nvme1}"

# Keys of --kv-transfer-config as variables, which the doctor also reads.
export VLLM_NVMEOF_TARGETS=$TARGETS
[ -z "${POOL_BYTES:-}" ] || export VLLM_NVMEOF_POOL_BYTES=$POOL_BYTES

# Exit code 0: healthy; 1: works, but slower or less resilient than possible; 2: cannot run.
status=0
vllm-nvmeof doctor --staging "${STAGING_GIB:=30}GiB" || status=$?
[ "$status" -lt 2 ] || exit "$status"

exec vllm serve "$model" --kv-offloading-backend nvmeof --kv-offloading-size "$STAGING_GIB" "$@"
