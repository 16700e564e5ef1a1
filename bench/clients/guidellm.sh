#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures a server by guidellm: conversations of three turns, two at once. It uses this checkout's
# torch, because its own would be one for CUDA.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
environment guidellm --override <(echo "torch; sys_platform == 'none'") guidellm==0.8.1
echo "$root/.venv/lib/python3.11/site-packages" \
    >"$clients/guidellm/lib/python3.11/site-packages/checkout.pth"

cd "$clients"
exec "$clients/guidellm/bin/guidellm" run --backend "kind=openai_http,target=$1,model=$2" \
    --tokenizer "kind=hf_auto,model=$3" --profile kind=concurrent,streams=2 \
    --data kind=synthetic_text,prompt_tokens=600,output_tokens=16,turns=3 \
    --constraint kind=max_requests,count=24 --disable-console-interactive "${@:4}"
