# SPDX-License-Identifier: Apache-2.0
"""Discovery on trees like the kernel's, whole and with files that vanish or make no sense."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.fabrics.trees import NQN, UUID, Tree, local_nvme, one_path, two_paths
from tests.unit.fabrics.trees import without_multipath as without_native_multipath
from vllm_nvmeof_offload.commands.doctor.examine import outline
from vllm_nvmeof_offload.commands.doctor.judge import can_do_io, judge_paths
from vllm_nvmeof_offload.fabric.topology import ABSENT, OFF, discover, read_states


def test_two_paths_to_one_namespace(tree: Tree) -> None:
    two_paths(tree, iopolicy="round-robin", ana=("optimized", "non-optimized"))
    fabric = tree.discover("/mnt/kv/pool")
    assert fabric.over_fabric
    assert fabric.is_remote
    assert fabric.mount is not None
    assert fabric.mount.options == ("rw", "noatime")
    (namespace,) = fabric.namespaces
    assert (namespace.device, namespace.nsid, namespace.uuid) == ("nvme0n1", 1, UUID)
    assert (namespace.wwid, namespace.nguid, namespace.size_bytes) == (
        f"uuid.{UUID}",
        None,
        1 << 20,
    )
    assert namespace.multipath
    assert namespace.limits.max_hw_sectors_kb == 2048
    assert namespace.limits.dma_alignment == 3
    assert namespace.subsystem.nqn == NQN
    assert namespace.subsystem.iopolicy == "round-robin"
    assert namespace.subsystem.model == "KV pool"
    first, second = namespace.subsystem.controllers
    assert (first.transport, first.traddr, first.trsvcid) == ("tcp", "10.0.0.2", "4420")
    assert second.traddr == "10.0.1.2"
    assert (first.state, first.queue_count, first.sqsize, first.kato) == ("live", 9, 127, 5)
    assert (first.ctrl_loss_tmo, first.fast_io_fail_tmo, first.reconnect_delay) == (600, OFF, 10)
    assert first.numa_node is None
    assert (first.tls, first.dhchap) == (None, None)
    assert [(one.controller, one.ana_state, one.ana_group) for one in namespace.paths] == [
        ("nvme0", "optimized", 1),
        ("nvme1", "non-optimized", 1),
    ]


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
    assert "c2VjcmV0" not in json.dumps(fabric.to_json())


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


def test_states_are_read_again(tree: Tree) -> None:
    first, second = two_paths(tree)
    fabric = tree.discover()
    states = read_states(fabric)
    assert [(one.carries_io, one.is_best) for one in states.values()] == [(True, True)] * 2
    (first / "nvme0c0n1/ana_state").write_text("non-optimized\n")
    (second / "state").write_text("connecting\n")
    states = read_states(fabric)
    assert states["nvme0"].ana == {"nvme0c0n1": "non-optimized"}
    assert (states["nvme0"].carries_io, states["nvme0"].is_best) == (True, False)
    assert (states["nvme1"].carries_io, states["nvme1"].state) == (False, "connecting")
    (first / "nvme0c0n1/ana_state").write_text("inaccessible\n")
    (second / "state").write_text("")
    states = read_states(fabric)
    assert not states["nvme0"].carries_io
    assert states["nvme1"].state is None
    assert (states["nvme1"].carries_io, states["nvme1"].is_best) == (True, False)
    (tree.sysfs / "class/nvme/nvme1").unlink()
    assert read_states(fabric)["nvme1"].state == ABSENT
    assert not read_states(fabric)["nvme1"].carries_io


def files_of(tree: Tree) -> list[Path]:
    walked = os.walk(tree.sysfs)
    return sorted(Path(parent) / name for parent, _, names in walked for name in names)


def use_all(tree: Tree) -> None:
    fabric = tree.discover()
    json.dumps(fabric.to_json())
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
