# SPDX-License-Identifier: Apache-2.0
# Functions that the other scripts here source.

fail() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# need_packages WHY PACKAGE…: installs Debian packages if possible without prompts; otherwise
# prints the command to run.
need_packages() {
    local why=$1
    shift
    local as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo --non-interactive)
    if command -v apt-get >/dev/null && "${as_root[@]}" true 2>/dev/null; then
        echo "${0##*/}: $why; installing $*"
        { "${as_root[@]}" apt-get update && "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y --no-install-recommends "$@"; } >/dev/null && return
    fi
    fail "$why. Run: sudo apt-get install $*"
}
