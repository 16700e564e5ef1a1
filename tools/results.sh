#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs benchmarks that need neither a GPU nor existing servers, and prints README.md and
# docs/benchmarks.md with their figures, and how long each part took. Nothing else should run
# meanwhile. Without names it measures what README.md shows, in some 35 minutes; with TRACES, a
# folder of kv-cache-tester's traces, it measures replay too. It needs root, because a control group
# throttles the stand-in for an NVMe-oF target. PEERS=1 compares with Lifeboat and KVCR too.
#
#   tools/results.sh [RESULTS_DIR [DISK_DIR [NAME…]]]     NAME: part to measure, such as turns
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/bench_setup.sh

# The kernel thread that dispatches throttled reads would wait for seconds behind vLLM's threads.
autogroup=/proc/sys/kernel/sched_autogroup_enabled
if [ -w "$autogroup" ]; then
    trap "echo $(<"$autogroup") >$autogroup" EXIT
    echo 0 >"$autogroup"
fi

results=${1:-bench/results}
work=build/results # a change in the checkout would mark the revision of later parts as dirty
disk=${2:-build/bench/disk}
names=("${@:3}")
lifeboat=${PEERS:+,lifeboat}
mkdir -p "$work" "$results"
[ ${#names[@]} -gt 0 ] ||
    names=(ttft restart turns beyond ${TRACES:+replay} ${PEERS:+kvcr beyond-kvcr})
bench=(.venv/bin/vllm-nvmeof bench)
if [ -n "${PEERS:-}" ]; then # beside this package, not among its dependencies
    .venv/bin/uv pip install --quiet --python .venv --no-deps --target build/peers \
        lifeboatcache==0.1.11 zstandard kvcr==0.1.1 nixl==1.5.0 nixl-cu12==1.5.0
    export PYTHONPATH=$PWD/build/peers
fi

# measure NAME COMMAND…: runs a benchmark; a failure does not stop the others.
measure() {
    local name=$1
    shift
    [[ " ${names[*]} " == *" $name "* ]] || return 0
    local begun_s=$SECONDS
    echo "== $name"
    if "${bench[@]}" "$@" --json "$work/$name.json"; then
        measured+=("$work/$name.json")
    else
        failed+=("$name")
    fi
    echo "== $name took $((SECONDS - begun_s)) s"
}

measured=() failed=()
measure ttft serve ttft --dir "$disk" --model smollm2 --arms full,pool,peer_full,peer \
    --lengths 1024,4096 --rounds 8
measure restart serve ttft --dir "$disk" --model smollm2 --lengths 4096 --restart \
    --arms pool,peer --rounds 8
measure turns serve turns --dir "$disk" --model medium --arms none,pool,target,peer --rounds 8 \
    --first-tokens 320 --grow-tokens 96
measure turns-smollm2 serve turns --dir "$disk" --model smollm2 --arms pool,peer --concurrency 8 \
    --first-tokens 256 --grow-tokens 80 --rounds 8
measure beyond serve hits --dir "$disk" --model medium --count 4 --prompt-tokens 4000 --rates 100 \
    --third-tokens 2400 --drive --arms none,pool,peer,target,peer_target$lifeboat --rounds 8
# KVCR's server uses half a core even when idle, so it is measured separately.
measure kvcr serve ttft --dir "$disk" --model medium --lengths 1024 --arms pool,peer,kvcr --rounds 8
measure beyond-kvcr serve hits --dir "$disk" --model medium --count 4 --prompt-tokens 4000 \
    --rates 100 --third-tokens 2400 --arms pool,kvcr --rounds 8
for model in gemma3 lfm2; do
    measure "hybrid-$model" serve ttft --dir "$disk" --model "$model" --lengths 4096 \
        --arms pool,peer$lifeboat --rounds 8
done
measure replay replay "${TRACES:-none}" --dir "$disk" --model medium --arms none,third,pool,peer \
    --rounds 8 --duration 20 --sessions 16 --users 6 --ramp 1 --time-scale 0.05 --think-max 3 \
    --block-tokens 2 --context-max 4000 --gpu-tokens 8192 --third-tokens 6000
measure hits serve hits --dir "$disk" --rates 0,100 --rounds 8
measure stall serve stall --dir /dev/shm/stall --rounds 11
measure moving serve moving --dir /dev/shm/moving --rounds 8 --turns 5
measure pool pool --dir "$disk" --rounds 8 --blocks 64KiB,512KiB,2MiB
measure latency latency --target "local=$disk" --throttle 100 --jobs 1,2 --rounds 8
measure peers peers --dir "$disk" --rates 400:400,200:600 --idle-s 20 --rounds 8
measure hotpath hotpath
[ ${#measured[@]} -eq 0 ] || cp "${measured[@]}" "$results"
if [ "$results" = bench/results ]; then
    "${bench[@]}" report README.md
    "${bench[@]}" report docs/benchmarks.md
fi
[ ${#failed[@]} -eq 0 ] || { echo "not measured: ${failed[*]}" >&2; exit 1; }
