#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs all benchmarks that need neither a GPU nor existing servers, short enough for bench/results/,
# and writes the results page. Takes about an hour, during which nothing else should run. Run it
# as root, because a control group throttles the stand-in for an NVMe-oF target.
#
#   tools/results.sh [RESULTS_DIR [DISK_DIR [NAME…]]]     NAME: benchmark to run, such as pool
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/bench_setup.sh

results=${1:-bench/results}
disk=${2:-build/bench/disk}
names=("${@:3}")
bench=(.venv/bin/vllm-nvmeof bench)

wanted() { [ ${#names[@]} -eq 0 ] || [[ " ${names[*]} " == *" $1 "* ]]; }

# measure NAME COMMAND…: runs a benchmark; a failure does not stop the others.
measure() {
    local name=$1
    shift
    wanted "$name" || return 0
    echo "== $name"
    "${bench[@]}" "$@" --json "$results/$name.json" || failed+=("$name")
}

failed=()
measure pool pool --dir "$disk" --rounds 3 --blocks 64KiB,512KiB,2MiB
measure latency latency --target "local=$disk" --throttle 100 --jobs 1,2 --rounds 3
measure ttft serve ttft --dir "$disk" --model smollm2 --rounds 6
measure turns serve turns --dir "$disk" --model smollm2 --arms none,pool,peer --concurrency 4,8 --rounds 3
measure hits serve hits --dir "$disk"
"${bench[@]}" report "$results"
[ ${#failed[@]} -eq 0 ] || { echo "not measured: ${failed[*]}" >&2; exit 1; }
