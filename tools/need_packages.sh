# SPDX-License-Identifier: Apache-2.0
# Sourced by the other scripts here.

fail() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# need_packages WHY PACKAGE…: installs Debian packages if that needs no questions; otherwise prints
# the command to run.
need_packages() {
    local why=$1
    shift
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "${0##*/}: $why; installing $*"
        { apt-get update && DEBIAN_FRONTEND=noninteractive \
            apt-get install -y --no-install-recommends "$@"; } >/dev/null && return
    fi
    fail "$why. Run: sudo apt-get install $*"
}
