#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures a server by LMCache's multi-round-qa, which is in its source distribution only: four
# users, who ask three times each.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source_of lmcache 0.5.6 benchmarks/multi_round_qa
environment lmcache openai pandas

exec "$clients/lmcache/bin/python" "$source/multi-round-qa.py" --base-url "$1/v1" --model "$2" \
    --num-users 4 --shared-system-prompt 100 --user-history-prompt 400 --answer-len 16 \
    --num-rounds 3 --qps 2 --time 30 --output "$clients/multi_round_qa.csv" "${@:4}"
