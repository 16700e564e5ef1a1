#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What `make bench` measures against, beside what set-up installs.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/need_packages.sh"

command -v fio >/dev/null || need_packages "fio is missing" fio
