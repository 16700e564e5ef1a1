#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures a server by NVIDIA's aiperf: eight conversations of three turns, six at once.
# Offline, aiperf would take a tokenizer's directory for the name of a repository.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
environment aiperf aiperf==0.13.0

unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE
exec "$clients/aiperf/bin/aiperf" profile --url "$1" --model "$2" --tokenizer "$3" \
    --endpoint-type chat --streaming --conversation-num 8 --conversation-turn-mean 3 \
    --conversation-turn-stddev 0 --synthetic-input-tokens-mean 500 --output-tokens-mean 16 \
    --concurrency 6 --random-seed 1 --ui simple --artifact-dir "$clients/aiperf-results" "${@:4}"
