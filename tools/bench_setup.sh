#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the packages that `make bench` needs in addition to those of `make setup`.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/need_packages.sh"

command -v fio >/dev/null || need_packages "fio is missing" fio
