#!/bin/busybox sh
# SPDX-License-Identifier: Apache-2.0
# First process of the guest. Its root is the outer machine's, read-only through 9p, under the
# unpacked packages and a layer in memory; then /run/job (the outer job directory) is run.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
echo "[rig] kernel up after $(cut -d' ' -f1 /proc/uptime) s"

fail() {
    echo "[rig] FAILED: $*"
    echo o >/proc/sysrq-trigger
    sleep 60
}

ram_mib=$(sed -n 's/.*rig_ram_mib=\([0-9]*\).*/\1/p' /proc/cmdline)
while read -r module; do
    options=
    [ "$module" = brd ] && options="rd_nr=2 rd_size=$((ram_mib * 1024)) max_part=0"
    [ "$module" = null_blk ] && options="nr_devices=0"
    modprobe "$module" $options || fail "module $module"
done </modules

share() { # TAG PLACE OPTIONS
    mkdir -p "$2"
    mount -t 9p -o "trans=virtio,version=9p2000.L,msize=1048576,$3" "$1" "$2" || fail "9p $1"
}
share outer /lower ro,cache=loose
share tools /tools ro,cache=loose
mount -t tmpfs -o size=50% rw /rw
mkdir /rw/upper /rw/work
mount -t overlay -o lowerdir=/tools:/lower,upperdir=/rw/upper,workdir=/rw/work overlay /newroot ||
    fail overlay
for place in proc sys dev; do
    mkdir -p /newroot/$place
    mount --move /$place /newroot/$place
done
for place in run dev/shm; do # not /tmp: the checkout may be there
    mkdir -p /newroot/$place
    mount -t tmpfs tmpfs /newroot/$place
done
share job /newroot/run/job cache=none
mount -t configfs configfs /newroot/sys/kernel/config || fail configfs
mount -t debugfs debugfs /newroot/sys/kernel/debug
hostname fabric-guest
echo "[rig] root up after $(cut -d' ' -f1 /newroot/proc/uptime) s"

exec setsid -c chroot /newroot /bin/bash -c '
    export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb LC_ALL=C.UTF-8
    ip link set lo up
    sleep 1000000 & # waited for at the end, when nothing can be loaded any more
    cd /run/job && bash ./job.sh
    echo $? >/run/job/status
    echo "[rig] job ended with $(cat /run/job/status) after $(cut -d" " -f1 /proc/uptime) s"
    sync -f /run/job
    echo o >/proc/sysrq-trigger
    wait' </dev/console >/dev/console 2>&1
