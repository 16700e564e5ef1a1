# SPDX-License-Identifier: Apache-2.0
"""Discovery on trees like the kernel's: devices, paths, links and mounts; whole, or with files
that vanish or make no sense."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.fabrics.trees import UUID, Tree, local_nvme, one_path, two_paths
from tests.unit.fabrics.trees import without_multipath as without_native_multipath
from vllm_nvmeof_offload.commands.doctor.examine import outline
from vllm_nvmeof_offload.commands.doctor.host import link_bytes_per_s, nics_of
from vllm_nvmeof_offload.commands.doctor.judge import can_do_io, judge_paths
from vllm_nvmeof_offload.fabric import OFF, discover, parse_cpus, read_machine, read_states
from vllm_nvmeof_offload.mounts import Mount, mount_of, parse_mountinfo, read_mounts


def test_two_paths_to_one_namespace(tree: Tree) -> None:
    two_paths(tree, iopolicy="round-robin", ana=("optimized", "non-optimized"))
    fabric = tree.discover("/mnt/kv/pool")
    assert fabric.over_fabric
    assert fabric.is_remote
    (namespace,) = fabric.namespaces
    assert (namespace.uuid, namespace.nguid) == (UUID, None)
    assert namespace.multipath
    assert namespace.limits.dma_alignment == 3
    first, _ = namespace.subsystem.controllers
    assert (first.sqsize, first.reconnect_delay, first.fast_io_fail_tmo) == (127, 10, OFF)
    assert (first.numa_node, first.tls, first.dhchap) == (None, None, None)


def test_a_kernel_without_native_multipath(tree: Tree) -> None:
    without_native_multipath(tree)
    (namespace,) = tree.discover().namespaces
    assert not namespace.multipath
    assert namespace.subsystem.name == "nvme-subsys0"
    assert [(one.name, one.controller, one.ana_state) for one in namespace.paths] == [
        ("nvme0n1", "nvme0", None)
    ]


def test_paths_of_other_heads_are_not_taken(tree: Tree) -> None:
    first, _ = two_paths(tree)
    tree.path(first, "nvme0c0n2", "inaccessible")
    tree.path(first, "nvme1c0n1", "inaccessible")
    assert {one.ana_state for one in tree.discover().namespaces[0].paths} == {"optimized"}


def test_a_controller_that_connects_has_no_path_yet(tree: Tree) -> None:
    _, second = two_paths(tree)
    (second / "nvme0c1n1/ana_state").unlink()
    (second / "nvme0c1n1/ana_grpid").unlink()
    (second / "nvme0c1n1").rmdir()
    (second / "state").write_text("connecting\n")
    (namespace,) = tree.discover().namespaces
    assert [one.name for one in namespace.paths] == ["nvme0c0n1"]
    assert [one.state for one in namespace.subsystem.controllers] == ["live", "connecting"]


def test_local_pcie_nvme(tree: Tree) -> None:
    local_nvme(tree)
    fabric = tree.discover()
    assert not fabric.over_fabric
    assert fabric.is_remote is False
    (controller,) = fabric.controllers
    assert (controller.transport, controller.traddr) == ("pcie", "0000:01:00.0")
    assert controller.ctrl_loss_tmo is None
    assert controller.pcie is not None
    assert (controller.pcie.speed, controller.pcie.width, controller.pcie.numa_node) == (16.0, 4, 0)


def test_a_plain_disk_through_a_partition(tree: Tree) -> None:
    tree.partition(tree.disk("sda", "8:0"), "8:1")
    tree.mount("/mnt/kv", "8:1")
    fabric = tree.discover()
    assert [(one.name, one.kind, one.over) for one in fabric.devices] == [
        ("sdap1", "partition", ("sda",)),
        ("sda", "disk", ()),
    ]
    assert fabric.devices[0].limits.logical_block_bytes == 512
    assert fabric.namespaces == ()


def test_device_mapper_over_two_namespaces_and_a_partition(tree: Tree) -> None:
    two_paths(tree)
    subsystem = tree.sysfs / "devices/virtual/nvme-subsystem/nvme-subsys0"
    second = tree.namespace(subsystem, "nvme0n2", "259:2")
    part = tree.partition(subsystem / "nvme0n1", "259:3")
    tree.dm("dm-0", "253:0", [part, second])
    tree.mount("/mnt/lvm", "253:0", "/dev/mapper/kv")
    tree.mount("/mnt/btrfs", "0:55", "/dev/mapper/kv", file_system="btrfs")
    for point in ("/mnt/lvm", "/mnt/btrfs"):
        fabric = tree.discover(point)
        assert [one.kind for one in fabric.devices] == ["dm", "partition", "disk", "disk"]
        assert {one.device for one in fabric.namespaces} == {"nvme0n1", "nvme0n2"}


def test_no_block_device_and_no_mount_table(tree: Tree) -> None:
    tree.mount("/mnt/kv", "0:9", "tmpfs", file_system="tmpfs")
    assert tree.discover().devices == ()
    assert not tree.discover().device_gone
    tree.mountinfo.unlink()
    assert tree.discover().mount is None


def test_a_mounted_device_that_is_gone(tree: Tree) -> None:
    tree.mount("/mnt/kv", "259:9", "/dev/nvme0n1")
    assert tree.discover().device_gone
    assert not discover("/mnt/kv", "/nowhere", str(tree.mountinfo)).device_gone


@pytest.mark.parametrize(
    ("attributes", "tls", "dhchap"),
    [
        ({"tls_key": "", "dhchap_secret": "none"}, "off", "off"),
        ({"tls_key": "00000000"}, "off", None),
        ({"tls_key": "1f2e3d4c", "dhchap_secret": "DHHC-1:00:c2VjcmV0:"}, "on", "on"),
        ({"dhchap_secret": "garbage"}, None, None),
    ],
)
def test_security_as_far_as_it_is_shown(
    tree: Tree, attributes: dict[str, str], tls: str | None, dhchap: str | None
) -> None:
    one_path(tree, **attributes)
    fabric = tree.discover()
    assert (fabric.controllers[0].tls, fabric.controllers[0].dhchap) == (tls, dhchap)
    assert "c2VjcmV0" not in json.dumps(asdict(fabric))


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("traddr=fe80::1%eth1,trsvcid=4420,host_iface=eth1", ("fe80::1%eth1", None, "eth1")),
        ("traddr=10.0.0.2,src_addr=10.0.0.1", ("10.0.0.2", "10.0.0.1", None)),
        ("garbage", ("garbage", None, None)),
        ("", (None, None, None)),
        ("=,,=x,traddr=", (None, None, None)),
    ],
)
def test_addresses(tree: Tree, address: str, found: tuple[str | None, ...]) -> None:
    one_path(tree, address=address)
    (one,) = tree.discover().controllers
    assert (one.traddr, one.src_addr, one.host_iface) == found


def files_of(tree: Tree) -> list[Path]:
    walked = os.walk(tree.sysfs)
    return sorted(Path(parent) / name for parent, _, names in walked for name in names)


def use_all(tree: Tree) -> None:
    fabric = tree.discover()
    json.dumps(asdict(fabric))
    judge_paths(fabric)
    can_do_io(fabric)
    read_states(fabric)
    outline(fabric, {})


def test_each_file_may_vanish_or_be_unreadable(tree: Tree) -> None:
    two_paths(tree)
    for path in files_of(tree):
        target = path.readlink() if path.is_symlink() else None
        content = None if target else path.read_bytes()
        path.unlink()
        use_all(tree)
        path.mkdir()  # reading it is an error, as EINVAL or ENODEV are
        use_all(tree)
        path.rmdir()
        path.symlink_to(path.name)  # for ever
        use_all(tree)
        path.unlink()
        if target:
            path.symlink_to(target)
        else:
            path.write_bytes(content or b"")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_garbage_is_unknown_and_never_an_error(tmp_path: Path, data: st.DataObject) -> None:
    tree = Tree(tmp_path / f"machine{len(list(tmp_path.iterdir()))}")
    two_paths(tree)
    tree.dm("dm-0", "253:0", [tree.sysfs / "class/block/nvme0n1"])
    plain = [path for path in files_of(tree) if not path.is_symlink()]
    for path in data.draw(st.lists(st.sampled_from(plain), max_size=8, unique=True)):
        path.write_bytes(data.draw(st.binary(max_size=40)))
    tree.mountinfo.write_bytes(tree.mountinfo.read_bytes() + data.draw(st.binary(max_size=80)))
    use_all(tree)


def test_a_stack_that_lies_on_itself_ends(tree: Tree) -> None:
    device = tree.dm("dm-0", "253:0", [])
    (device / "slaves/dm-0").symlink_to(device)
    tree.mount("/mnt/kv", "253:0")
    assert [one.name for one in tree.discover().devices] == ["dm-0"]
    outline(tree.discover(), {})


@pytest.mark.parametrize(
    ("file_system", "remote"),
    [("tmpfs", False), ("nfs4", True), ("wekafs", True), ("overlay", None), ("fuse.x", None)],
)
def test_without_a_device_the_file_system_shows_whether_it_is_remote(
    tree: Tree, file_system: str, remote: bool | None
) -> None:
    tree.mount("/mnt/kv", "0:9", file_system, file_system=file_system)
    assert tree.discover().is_remote is remote


@pytest.mark.parametrize(
    ("file_system", "device", "network"),
    [
        *((one, "0:9", False) for one in ("tmpfs", "overlay", "zfs", "btrfs")),
        *((one, "259:1", False) for one in ("xfs", "ext4", "fuseblk")),
        *((one, "259:1", True) for one in ("gfs2", "ocfs2")),
        *((one, "0:9", True) for one in ("nfs4", "lustre", "wekafs", "beegfs", "virtiofs", "9p")),
        *((one, "0:9", True) for one in ("fuse.hf3fs", "fuse.sshfs", "fuse", "a_new_one")),
    ],
)
def test_what_has_no_block_device_of_this_host_may_be_mounted_by_others(
    tree: Tree, file_system: str, device: str, network: bool
) -> None:
    tree.mount("/mnt/kv", device, file_system, file_system=file_system)
    assert tree.discover().is_network_file_system is network


NEEDS_IPV6 = pytest.mark.skipif(
    not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6"
)


def nic_names(tree: Tree) -> dict[str, str]:
    return {name: nic.name for name, nic in nics_of(tree.discover()).items()}


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("traddr=127.0.0.1", "lo"),
        pytest.param("traddr=::1", "lo", marks=NEEDS_IPV6),
        ("traddr=127.0.0.1,host_iface=eth1", "eth1"),
        ("traddr=192.0.2.1,host_traddr=127.0.0.1", "lo"),
        ("traddr=192.0.2.1,src_addr=127.0.0.1", "lo"),
        ("traddr=127.0.0.1,src_addr=192.0.2.99", None),
        ("traddr=127.0.0.1,host_iface=eth9", None),
        ("traddr=nn-0x1:pn-0x2", None),
        ("", None),
    ],
)
def test_the_interface_of_a_path(tree: Tree, address: str, expected: str | None) -> None:
    tree.nic("lo")
    tree.nic("eth1")
    one_path(tree, address=address)
    assert nic_names(tree).get("nvme0") == expected


def test_a_bond_has_the_cards_below_it_and_a_virtual_interface_no_speed(tree: Tree) -> None:
    below = tree.nic("eth0", current_link_speed="8.0 GT/s PCIe", current_link_width="8")
    bond = tree.write(tree.sysfs / "devices/virtual/net/bond0", {"speed": "50000"})
    (bond / "lower_eth0").symlink_to(below)
    tree.link("class/net/bond0", bond)
    veth = tree.write(tree.sysfs / "devices/virtual/net/veth0", {"speed": "10000"})
    tree.link("class/net/veth0", veth)
    first, second = two_paths(tree)
    (first / "address").write_text("traddr=10.0.0.2,host_iface=bond0\n")
    (second / "address").write_text("traddr=10.0.0.2,host_iface=veth0\n")
    nics = nics_of(tree.discover())
    assert nics["nvme0"].speed_mbps == 50000
    assert [(card.speed, card.width) for card in nics["nvme0"].cards] == [(8.0, 8)]
    assert (nics["nvme1"].speed_mbps, nics["nvme1"].cards) == (None, ())
    assert link_bytes_per_s(tree.discover(), nics) is None


def test_each_link_counts_once(tree: Tree) -> None:
    tree.nic("eth0", "25000")
    tree.nic("eth1", "100000")
    first, second = two_paths(tree)
    (first / "address").write_text("traddr=10.0.0.2,host_iface=eth0\n")
    (second / "address").write_text("traddr=10.0.1.2,host_iface=eth1\n")
    fabric = tree.discover()
    assert link_bytes_per_s(fabric, nics_of(fabric)) == 125e9 / 8
    (first / "address").write_text("traddr=10.0.1.9,host_iface=eth1\n")
    fabric = tree.discover()
    assert link_bytes_per_s(fabric, nics_of(fabric)) == 100e9 / 8
    (tree.sysfs / "class/net/eth1/speed").write_text("-1\n")
    assert link_bytes_per_s(fabric, nics_of(fabric)) is None


def test_a_local_drives_link(tree: Tree) -> None:
    local_nvme(tree)
    fabric = tree.discover()
    assert link_bytes_per_s(fabric, {}) == pytest.approx(16e9 * 4 / 8 * 128 / 130)


def test_without_any_link_no_rate_is_known(tree: Tree) -> None:
    tree.disk("sda", "8:0")
    tree.mount("/mnt/kv", "8:0")
    assert link_bytes_per_s(tree.discover(), {}) is None


def test_nodes_and_their_cpus(tree: Tree) -> None:
    tree.nodes("0-1,8", "2-3")
    machine = read_machine(str(tree.sysfs))
    assert machine.nodes == {0: {0, 1, 8}, 1: {2, 3}}
    assert machine.kernel >= (4, 0)
    assert parse_cpus("x,3-,1-2,") == {1, 2}
    assert read_machine("/none").nodes == {}


ESCAPED = " \t\n\\#"
words = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0,"), min_size=1, max_size=8
).filter(lambda word: word != "-")
tags = st.text("abcdefghij:0123456789_", min_size=1, max_size=8)


def escape(text: str) -> str:
    """Escape as the kernel does."""
    return "".join(f"\\{ord(one):03o}" if one in ESCAPED else one for one in text)


@st.composite
def mounts(draw: st.DrawFn) -> Mount:
    return Mount(
        mount_id=draw(st.integers(0, 2**31)),
        parent_id=draw(st.integers(0, 2**31)),
        device=f"{draw(st.integers(0, 4095))}:{draw(st.integers(0, 2**20))}",
        root="/" + draw(words),
        point="/" + draw(words),
        options=tuple(draw(st.lists(tags, min_size=1, max_size=3))),
        file_system=draw(tags),
        source=draw(words),
        super_options=tuple(draw(st.lists(tags, min_size=1, max_size=3))),
    )


def line_of(mount: Mount, optional: list[str]) -> str:
    before = [mount.mount_id, mount.parent_id, mount.device, escape(mount.root)]
    before += [escape(mount.point), ",".join(mount.options), *optional]
    after = [mount.file_system, escape(mount.source), ",".join(mount.super_options)]
    return " ".join(map(str, before)) + " - " + " ".join(after)


@given(st.lists(st.tuples(mounts(), st.lists(tags, max_size=3)), max_size=4))
def test_the_kernels_escapes_are_decoded(made: list[tuple[Mount, list[str]]]) -> None:
    text = "".join(line_of(mount, optional) + "\n" for mount, optional in made)
    assert parse_mountinfo(text) == [mount for mount, _ in made]


@given(st.text())
def test_garbage_is_no_mount_and_no_error(text: str) -> None:
    for mount in parse_mountinfo(text):
        assert mount_of(mount.point, [mount]) in (mount, None)


@given(st.lists(mounts(), max_size=6), words)
def test_a_look_up_in_any_table_ends(table: list[Mount], path: str) -> None:
    assert mount_of("/" + path, table) in [*table, None]


def test_bytes_that_are_not_text_are_read(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_bytes(b"1 1 8:1 / /\xff\\040x rw - xfs /dev/sda rw\n")
    (mount,) = read_mounts(str(tmp_path / "mountinfo"))
    assert mount.point == "/\udcff x"
    assert read_mounts(str(tmp_path / "none")) == []


TABLE = """\
1 1 0:1 / / rw - rootfs rootfs rw
20 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 20 259:1 / /mnt/kv rw,noatime shared:3 master:2 - xfs /dev/nvme0n1 rw
31 20 259:2 / /mnt/kv2 rw - xfs /dev/nvme1n1 rw
40 20 8:2 / /srv rw - ext4 /dev/sdb rw
41 40 8:3 / /srv/deep rw - ext4 /dev/sdc rw
42 40 8:4 / /srv rw - ext4 /dev/sdd rw
"""


@pytest.mark.parametrize(
    ("path", "mount_id"),
    [
        ("/mnt/kv/pool", 30),
        ("/mnt/kv", 30),
        ("/mnt/kv2", 31),
        ("/mnt/kv3", 20),
        ("/mnt/../mnt/kv//x", 30),
        ("/", 20),
        ("/srv/deep/x", 42),
    ],
)
def test_a_path_is_on_the_mount_that_the_kernel_would_find(path: str, mount_id: int) -> None:
    found = mount_of(path, parse_mountinfo(TABLE))
    assert found is not None
    assert found.mount_id == mount_id


def test_without_a_root_mount_a_look_up_finds_nothing() -> None:
    assert mount_of("/x", []) is None
    assert mount_of("/x", parse_mountinfo(TABLE.splitlines()[2])) is None
