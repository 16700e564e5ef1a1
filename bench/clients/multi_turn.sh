#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures a server by vLLM's multi-turn benchmark, which is in its source distribution only: twelve
# conversations of three turns, six at once. It imports vLLM, so it runs with this checkout's.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source_of vllm 0.32.0 benchmarks/multi_turn
python=$root/.venv/bin/python more=$clients/multi_turn
[ -e "$more" ] || uv pip install --quiet --python "$python" --target "$more" --no-deps \
    pandas==2.3.3 python-dateutil pytz six tzdata xlsxwriter

cat >"$more/conversations.json" <<JSON
{"filetype": "generate_conversations", "num_conversations": 12, "print_stats": false,
 "text_files": ["$root/docs/benchmarks.md", "$root/docs/configuration.md"],
 "prompt_input": {"num_turns": {"distribution": "constant", "value": 6},
                  "common_prefix_num_tokens": {"distribution": "constant", "value": 200},
                  "prefix_num_tokens": {"distribution": "constant", "value": 600},
                  "num_tokens": {"distribution": "constant", "value": 60}},
 "prompt_output": {"num_tokens": {"distribution": "constant", "value": 20}}}
JSON
cd "$source"
PYTHONPATH=$more exec "$python" benchmark_serving_multi_turn.py --url "$1" \
    --served-model-name "$2" --model "$3" --input-file "$more/conversations.json" --num-clients 2 \
    --max-active-conversations 6 --seed 1 "${@:4}"
