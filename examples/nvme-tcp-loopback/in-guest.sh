#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The steps of README.md in the emulated guest of the tests, where they can do no harm:
#   .venv/bin/python -m tests.fabric.rig examples/nvme-tcp-loopback/in-guest.sh
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
nvmeof=.venv/bin/vllm-nvmeof
export PLACE=/run/loopback SIZE=384M BUFFERED=1 # /run is in memory

say() { printf '\n=== %s\n' "$*"; }

say "a target with two paths, mounted"
target=$("$here/loopback.sh" up)
"$here/loopback.sh" status
say "what the doctor says of it"
"$nvmeof" doctor --target "$target" || echo "(exit code $?: there is something to say)"
say "one path is taken away"
"$here/loopback.sh" cut
sleep 1
"$here/loopback.sh" status
"$nvmeof" doctor --target "$target" || echo "(exit code $?: there is something to say)"
say "and given back"
"$here/loopback.sh" mend
sleep 3
"$here/loopback.sh" status
say "everything is taken down"
"$here/loopback.sh" down
[ ! -e "$PLACE" ] && [ -z "$(ls /sys/kernel/config/nvmet/subsystems)" ] && echo "nothing is left"
