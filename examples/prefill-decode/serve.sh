#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serves a model as one half of a pair: a prefill server computes prompts, and a decode server gets
# their KV over NIXL and answers. Each keeps its KV cache in CPU memory and on the targets.
#
#   TARGETS=/mnt/nvme0 SIDE_PORT=5600 examples/prefill-decode/serve.sh prefill MODEL --port 8100
#   TARGETS=/mnt/nvme0 SIDE_PORT=5700 examples/prefill-decode/serve.sh decode  MODEL --port 8200
#
# TARGETS: directories on mounted namespaces, separated by ":". STAGING_GIB: pinned memory over all
# ranks. HOST: the address at which the other server reaches this one. SIDE_PORT: the first port for
# NIXL's handshake; every rank uses one port.
set -euo pipefail

usage="usage: TARGETS=/mnt/nvme0 examples/prefill-decode/serve.sh prefill|decode MODEL [vllm's options]"
role=${1:?$usage}
model=${2:?$usage}
shift 2
: "${TARGETS:?name the directories of the pool, such as TARGETS=/mnt/nvme0:/mnt/nvme1}"

ours='{"kv_connector": "NVMeoFOffloadingConnector"}'
nixl() { # kv_role
    printf '{"kv_connector": "NixlConnector", "kv_role": "%s"%s}' "$1" \
        "${KV_BUFFER_DEVICE:+, \"kv_buffer_device\": \"$KV_BUFFER_DEVICE\"}"
}
# The first connector that has a part of a request loads it: NIXL gets the KV that the prefill
# server computed, and stored chunks are loaded if NIXL has none.
case $role in
prefill) connectors="$ours, $(nixl kv_producer)" ;;
decode) connectors="$(nixl kv_consumer), $ours" ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac

export VLLM_NVMEOF_TARGETS=$TARGETS
export VLLM_NIXL_SIDE_CHANNEL_HOST=${HOST:-127.0.0.1} VLLM_NIXL_SIDE_CHANNEL_PORT=${SIDE_PORT:-5600}
exec vllm serve "$model" --kv-offloading-backend nvmeof --kv-offloading-size "${STAGING_GIB:=30}" \
    --kv-transfer-config "{\"kv_connector\": \"NVMeoFMultiConnector\", \"kv_role\": \"kv_both\",
        \"kv_connector_extra_config\": {\"connectors\": [$connectors]}}" "$@"
