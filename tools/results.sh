#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures everything that needs neither a GPU nor a server of yours, with settings short enough for
# bench/results/, and makes its page. Takes about 40 minutes, in which nothing else should run. Run it
# as root: the throttled stand-in for an NVMe-oF target is a control group.
#
#   tools/results.sh [RESULTS_DIR [DISK_DIR [NAME…]]]     NAME: run only these, such as pool latency
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/bench_setup.sh

results=${1:-bench/results}
disk=${2:-build/bench/disk}
names=("${@:3}")
bench=(.venv/bin/vllm-nvmeof bench)

wanted() { [ ${#names[@]} -eq 0 ] || [[ " ${names[*]} " == *" $1 "* ]]; }

# measure NAME COMMAND…: a failure does not stop the others.
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
measure tier-load stream --dir "$disk" --parts load --rounds 2
measure tier-resume stream --dir "$disk" --parts resume,prefetch --rounds 1
measure tier-admission stream --dir "$disk" --parts admission --rounds 2
measure follow hotpath follow --dir /dev/shm/follow
measure cost cost --dir "$disk" --pairs 6
if wanted serve; then
    echo "== serve: ttft, hits, turns on the same servers"
    "${bench[@]}" serve all --dir "$disk" --out "$results" || failed+=(serve)
fi
"${bench[@]}" report "$results"
[ ${#failed[@]} -eq 0 ] || { echo "not measured: ${failed[*]}" >&2; exit 1; }
