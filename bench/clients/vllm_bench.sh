#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures a running server with vLLM's own load generator: prompts that share a few prefixes. Send
# the same twice, the second time after POST /reset_prefix_cache, to see what is loaded.
#
#   bench/clients/vllm_bench.sh URL MODEL TOKENIZER_DIR [MORE_OPTIONS…]
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

exec vllm bench serve --backend openai --base-url "$1" --model "$2" --tokenizer "$3" \
    --dataset-name prefix_repetition --prefix-repetition-prefix-len 1024 \
    --prefix-repetition-suffix-len 64 --prefix-repetition-num-prefixes 8 \
    --prefix-repetition-output-len 16 --num-prompts 32 --max-concurrency 4 --ignore-eos --seed 1 \
    "${@:4}"
