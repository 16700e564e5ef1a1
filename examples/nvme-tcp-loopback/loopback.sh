#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up a real NVMe/TCP target on this machine for experiments: the kernel's target on a file, two
# paths over loopback addresses, and xfs. Changes only what it has created.
#
#   sudo ./loopback.sh up        create and mount it, and print the mount point
#   sudo ./loopback.sh cut       remove path 1 (the target removes the port)
#   sudo ./loopback.sh mend      restore path 1
#   sudo ./loopback.sh status    controllers, their states, the mount
#   sudo ./loopback.sh down      remove everything
#
# Optional variables: PLACE (the file's directory, created and removed), SIZE (of the file),
# BUFFERED=1 if PLACE is on a file system without O_DIRECT, such as tmpfs.
set -euo pipefail

place=${PLACE:-/var/tmp/vllm-nvmeof-loopback}
size=${SIZE:-4G}
mount_point=$place/mnt
nqn=nqn.2026-11.example.vllm-nvmeof:loopback
uuid=6c6f6f70-6261-636b-0000-766c6c6d6e76 # identifies the device, whatever its name
configfs=/sys/kernel/config/nvmet
subsystem=$configfs/subsystems/$nqn
port=4420
paths="1 2"

fail() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# Our ports have high numbers in configfs, so that they do not clash with existing ports.
port_of() { echo "$configfs/ports/5474$1"; }

device() { # the namespace's block device, or nothing if there is none
    local wwid
    for wwid in /sys/block/nvme*n*/wwid; do
        if [ "$(cat "$wwid" 2>/dev/null)" = "uuid.$uuid" ]; then
            wwid=${wwid%/wwid}
            wwid=${wwid##*/}
            # With native multipath each path also has a hidden device, which is skipped.
            case ${wwid#nvme} in *c*) ;; *) echo "/dev/$wwid" ;; esac
        fi
    done
}

controllers() { # only those connected to our subsystem
    local name
    for name in /sys/class/nvme/nvme*/subsysnqn; do
        [ "$(cat "$name" 2>/dev/null)" != "$nqn" ] || dirname "$name"
    done
}

wait_for() { # SECONDS COMMAND…
    local left=$((10 * $1))
    shift
    until "$@"; do
        left=$((left - 1))
        [ "$left" -gt 0 ] || return 1
        sleep 0.1
    done
}

appeared() { [ -n "$(device)" ]; }

disconnected() { [ -z "$(controllers)" ]; }

offer() { ln -s "$subsystem" "$(port_of "$1")/subsystems/$nqn"; }

up() {
    [ ! -e "$place" ] || fail "$place already exists; run '${0##*/} down', or set PLACE"
    local module
    for module in nvmet nvmet-tcp nvme-tcp; do
        [ -e "/sys/module/${module//-/_}" ] || modprobe "$module" ||
            fail "this kernel has no module $module (on Ubuntu: linux-modules-extra-\$(uname -r))"
    done
    command -v mkfs.xfs >/dev/null || fail "mkfs.xfs is missing: install xfsprogs"
    mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
    [ ! -e "$subsystem" ] || fail "$subsystem already exists; run '${0##*/} down'"
    trap 'down >/dev/null 2>&1' EXIT # a partial failure leaves nothing behind

    mkdir -p "$mount_point"
    truncate -s "$size" "$place/disk"
    mkdir "$subsystem"
    echo 1 >"$subsystem/attr_allow_any_host"
    mkdir "$subsystem/namespaces/1"
    echo -n "$place/disk" >"$subsystem/namespaces/1/device_path"
    echo -n "$uuid" >"$subsystem/namespaces/1/device_uuid"
    [ -z "${BUFFERED:-}" ] || echo 1 >"$subsystem/namespaces/1/buffered_io"
    echo 1 >"$subsystem/namespaces/1/enable"
    local path there
    for path in $paths; do
        there=$(port_of "$path")
        mkdir "$there"
        echo tcp >"$there/addr_trtype"
        echo ipv4 >"$there/addr_adrfam"
        echo "127.0.0.$path" >"$there/addr_traddr"
        echo "$port" >"$there/addr_trsvcid"
        offer "$path"
        # As `nvme connect` does. With fast_io_fail_tmo, I/O fails soon instead of hanging.
        echo "transport=tcp,traddr=127.0.0.$path,trsvcid=$port,nqn=$nqn,\
ctrl_loss_tmo=600,fast_io_fail_tmo=10,keep_alive_tmo=5,reconnect_delay=2" >/dev/nvme-fabrics
    done
    wait_for 10 appeared || fail "no device has appeared; see dmesg"
    mkfs.xfs -q "$(device)"
    mount -o noatime "$(device)" "$mount_point"
    trap - EXIT
    echo "$mount_point"
}

down() {
    # A part that is in use stays, with everything under it.
    if mountpoint -q "$mount_point"; then
        umount "$mount_point" || fail "$mount_point is in use: stop its users first"
    fi
    local controller path there
    for controller in $(controllers); do
        echo 1 >"$controller/delete_controller" || true
    done
    wait_for 10 disconnected || fail "controllers are still connected: $(controllers)"
    for path in $paths; do
        there=$(port_of "$path")
        rm -f "$there/subsystems/$nqn"
        [ ! -d "$there" ] || rmdir "$there"
    done
    [ ! -d "$subsystem/namespaces/1" ] || rmdir "$subsystem/namespaces/1"
    [ ! -d "$subsystem" ] || rmdir "$subsystem"
    rm -f "$place/disk"
    [ ! -d "$mount_point" ] || rmdir "$mount_point"
    [ ! -d "$place" ] || rmdir "$place"
}

status() {
    local controller
    for controller in $(controllers); do
        echo "${controller##*/} $(cat "$controller/state") $(cat "$controller/address")"
    done
    echo "device: $(device)"
    grep " $mount_point " /proc/self/mounts || echo "not mounted"
}

[ "$(id -u)" = 0 ] || fail "needs root to create and mount a target"
case ${1:-} in
up) up ;;
down) down ;;
cut) rm "$(port_of 1)/subsystems/$nqn" ;;
mend) offer 1 ;;
status) status ;;
*) fail "usage: ${0##*/} up|cut|mend|status|down" ;;
esac
