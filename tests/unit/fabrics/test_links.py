# SPDX-License-Identifier: Apache-2.0
"""The interface of a path, its rate, and the NUMA nodes of its card and of the GPUs."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.fabrics.trees import Tree, local_nvme, one_path, two_paths
from vllm_nvmeof_offload.commands.doctor.host import link_bytes_per_s, nics_of
from vllm_nvmeof_offload.fabric.machine import parse_cpus, read_machine


def two_nics(tree: Tree) -> None:
    """eth0 is on 10.0.0.0/24, eth1 on 10.0.1.0/24 and the way to everywhere else."""
    tree.nic("eth0", "25000")
    tree.nic("eth1", "100000")
    tree.route("eth0", "0000000A")
    tree.route("eth1", "0001000A")
    tree.route("eth1", "00000000", "00000000")


def names(tree: Tree) -> dict[str, str]:
    return {name: nic.name for name, nic in nics_of(tree.discover(), tree.net).items()}


@pytest.mark.skipif(sys.byteorder != "little", reason="the routes made up here are little-endian")
@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("traddr=10.0.0.2", "eth0"),
        ("traddr=10.0.0.2,host_iface=eth1", "eth1"),
        ("traddr=10.9.9.9,host_traddr=10.0.0.1", "eth0"),
        ("traddr=10.0.0.2,src_addr=10.0.1.1", "eth1"),
        ("traddr=10.9.9.9", "eth1"),
        ("traddr=10.0.0.2,host_iface=eth9", None),
        ("traddr=nn-0x1:pn-0x2", None),
        ("", None),
    ],
)
def test_the_interface_of_a_path(tree: Tree, address: str, expected: str | None) -> None:
    two_nics(tree)
    one_path(tree, address=address)
    assert names(tree).get("nvme0") == expected


def test_two_interfaces_on_one_subnet_give_no_guess(tree: Tree) -> None:
    two_nics(tree)
    tree.route("eth1", "0000000A")
    one_path(tree, address="traddr=10.0.0.2,host_traddr=10.0.0.1")
    assert names(tree) == {}


def test_ipv6_routes(tree: Tree, tmp_path: Path) -> None:
    tree.nic("eth0")
    rest = (
        "00000000000000000000000000000000 00 " + "0" * 32 + " 00000100 00000001 00000000 00000001"
    )
    lines = [
        f"fd000000000000000000000000000000 40 {rest} eth0",
        f"00000000000000000000000000000000 00 {rest} lo",
        "garbage",
    ]
    (tmp_path / "v6").write_text("\n".join(lines))
    one_path(tree, address="traddr=fd00::2,trsvcid=4420")
    places = replace(tree.net, routes="/none", routes_v6=str(tmp_path / "v6"))
    assert nics_of(tree.discover(), places)["nvme0"].name == "eth0"


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
    nics = nics_of(tree.discover(), tree.net)
    assert nics["nvme0"].speed_mbps == 50000
    assert [(card.speed, card.width) for card in nics["nvme0"].cards] == [(8.0, 8)]
    assert (nics["nvme1"].speed_mbps, nics["nvme1"].cards) == (None, ())
    assert link_bytes_per_s(tree.discover(), nics) is None


@pytest.mark.skipif(sys.byteorder != "little", reason="the routes made up here are little-endian")
def test_each_link_counts_once(tree: Tree) -> None:
    two_nics(tree)
    first, _ = two_paths(tree)
    fabric = tree.discover()
    assert link_bytes_per_s(fabric, nics_of(fabric, tree.net)) == 125e9 / 8
    (first / "address").write_text("traddr=10.0.1.9\n")
    fabric = tree.discover()
    assert link_bytes_per_s(fabric, nics_of(fabric, tree.net)) == 100e9 / 8
    (tree.sysfs / "class/net/eth1/speed").write_text("-1\n")
    assert link_bytes_per_s(fabric, nics_of(fabric, tree.net)) is None


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


class FakeNvml(types.ModuleType):
    """Two GPUs, or a driver that does not answer."""

    class NVMLError(Exception):
        pass

    def __init__(self, broken: bool) -> None:
        super().__init__("pynvml")
        self.broken = broken
        self.running = False

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError
        self.running = True

    def nvmlShutdown(self) -> None:
        self.running = False

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(busId=[b"00000000:3B:00.0", "00000000:AF:00.0"][handle])


@pytest.mark.parametrize("broken", [False, True])
def test_gpus(tree: Tree, monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    nvml = FakeNvml(broken)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    tree.write(tree.sysfs / "bus/pci/devices/0000:3b:00.0", {"numa_node": "1"})
    gpus = read_machine(str(tree.sysfs)).gpus
    assert [one.numa_node for one in gpus] == ([] if broken else [1, None])
    assert not nvml.running
