#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the steps of README.md in the tests' emulated guest, where they cannot do harm:
#   .venv/bin/python -m tests.fabric.rig examples/nvme-tcp-loopback/in-guest.sh
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
nvmeof=.venv/bin/vllm-nvmeof
export PLACE=/run/loopback SIZE=384M BUFFERED=1 # /run is in memory

step() { printf '\n=== %s\n' "$*"; }

step "a target with two paths, mounted"
target=$("$here/loopback.sh" up)
"$here/loopback.sh" status
step "the doctor's report"
"$nvmeof" doctor --target "$target" || echo "(exit code $?: the doctor has findings)"
step "one path is removed"
"$here/loopback.sh" cut
sleep 1
"$here/loopback.sh" status
"$nvmeof" doctor --target "$target" || echo "(exit code $?: the doctor has findings)"
step "the path is restored"
"$here/loopback.sh" mend
sleep 3
"$here/loopback.sh" status
step "everything is removed"
"$here/loopback.sh" down
[ ! -e "$PLACE" ] && [ -z "$(ls /sys/kernel/config/nvmet/subsystems)" ] && echo "nothing is left"
