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

from tests.unit.fabrics.trees import UUID, Tree, one_path, two_paths
from tests.unit.fabrics.trees import without_multipath as without_native_multipath
from vllm_nvmeof_offload.commands.doctor.examine import outline
from vllm_nvmeof_offload.commands.doctor.host import link_bytes_per_s, nics_of
from vllm_nvmeof_offload.commands.doctor.judge import can_do_io, judge_paths
from vllm_nvmeof_offload.fabric import OFF, parse_cpus, read_machine, read_states
from vllm_nvmeof_offload.mounts import Mount, mount_of, parse_mountinfo


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


@pytest.mark.parametrize(
    ("file_system", "remote"),
    [("tmpfs", False), ("nfs4", True), ("wekafs", True), ("overlay", None), ("fuse.x", None)],
)
def test_without_a_device_the_file_system_shows_whether_it_is_remote(
    tree: Tree, file_system: str, remote: bool | None
) -> None:
    tree.mount("/mnt/kv", "0:9", file_system, file_system=file_system)
    assert tree.discover().is_remote is remote


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


def test_nodes_and_their_cpus(tree: Tree) -> None:
    tree.nodes("0-1,8", "2-3")
    machine = read_machine(str(tree.sysfs))
    assert machine.nodes == {0: {0, 1, 8}, 1: {2, 3}}
    assert machine.kernel >= (4, 0)
    assert parse_cpus("x,3-,1-2,") == {1, 2}
    assert read_machine("/none").nodes == {}


words = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0,"), min_size=1, max_size=8
).filter(lambda word: word != "-")
tags = st.text("abcdefghij:0123456789_", min_size=1, max_size=8)


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


@given(st.text())
def test_garbage_is_no_mount_and_no_error(text: str) -> None:
    for mount in parse_mountinfo(text):
        assert mount_of(mount.point, [mount]) in (mount, None)
