#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures a server by LMCache's long_doc_qa, which is in its source distribution only: eight
# documents, each twice, two at once.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source_of lmcache 0.5.6 benchmarks/long_doc_qa
environment lmcache openai pandas

cd "$clients"
exec "$clients/lmcache/bin/python" "$source/long_doc_qa.py" --base-url "$1/v1" --model "$2" \
    --document-length 700 --num-documents 8 --output-len 16 --repeat-count 2 --repeat-mode tile \
    --max-inflight-requests 2 --completions --output long_doc_qa.out "${@:4}"
