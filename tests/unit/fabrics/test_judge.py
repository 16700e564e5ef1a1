# SPDX-License-Identifier: Apache-2.0
"""Each finding, where it belongs and where it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.fabrics.trees import Tree, local_nvme, one_path, two_paths, without_multipath
from vllm_nvmeof_offload.commands.doctor.host import nics_of
from vllm_nvmeof_offload.commands.doctor.judge import (
    judge_kernel,
    judge_mount,
    judge_numa,
    judge_paths,
    judge_pcie,
    judge_rdma,
)
from vllm_nvmeof_offload.fabric.findings import Finding, Severity
from vllm_nvmeof_offload.fabric.machine import Gpu, Machine
from vllm_nvmeof_offload.fabric.rdma import read_rdma_ports, roce_payload_bytes

OK, WARNING, ERROR = Severity.OK, Severity.WARNING, Severity.ERROR
MACHINE = Machine({0: frozenset({0, 1}), 1: frozenset({2, 3})}, frozenset({0}), (), (6, 12), "6.12")


def judged(tree: Tree) -> dict[str, Finding]:
    return {one.check: one for one in judge_paths(tree.discover())}


def test_a_good_fabric_has_only_ok_findings(tree: Tree) -> None:
    for controller in two_paths(tree, iopolicy="round-robin"):
        (controller / "fast_io_fail_tmo").write_text("5\n")
    found = judged(tree)
    assert {one.severity for one in found.values()} == {OK}
    assert "nvme0n1 by tcp" in found["fabric"].evidence
    assert "nvme0c0n1, nvme0c1n1" in found["paths"].evidence
    assert found["fast_io_fail_tmo"].evidence == "nvme0 5 s, nvme1 5 s"
    assert "unknown" in found["tls"].evidence
    assert "unknown" in found["authentication"].evidence


@pytest.mark.parametrize("file_system", ["ext4", "tmpfs"])
def test_a_target_not_on_nvmeof_is_ok_and_reported(tree: Tree, file_system: str) -> None:
    number = "8:0" if file_system == "ext4" else "0:9"
    tree.disk("sda", "8:0")
    tree.mount("/mnt/kv", number, file_system=file_system)
    found = judged(tree)
    assert list(found) == ["fabric"]
    assert found["fabric"].severity is OK
    assert f"not on NVMe over Fabrics: {file_system}" in found["fabric"].evidence


def test_local_nvme_is_reported_and_needs_no_paths(tree: Tree) -> None:
    local_nvme(tree)
    found = judged(tree)
    assert list(found) == ["fabric", "controllers"]
    assert "local NVMe" in found["fabric"].evidence


def test_a_device_that_is_gone(tree: Tree) -> None:
    tree.mount("/mnt/kv", "259:9", "/dev/nvme0n1")
    found = judged(tree)["fabric"]
    assert found.severity is ERROR
    assert "259:9" in found.evidence
    assert "umount /mnt/kv" in found.remedy


def test_one_path_only(tree: Tree) -> None:
    one_path(tree)
    found = judged(tree)
    assert found["paths"].severity is WARNING
    assert "nvme connect -t tcp -n nqn.2026-01.test:pool" in found["paths"].remedy
    assert "iopolicy" not in found


def test_no_native_multipath(tree: Tree) -> None:
    without_multipath(tree)
    found = judged(tree)
    assert "native multipath is off" in found["paths"].evidence
    assert "multipath=Y" in found["paths"].remedy
    assert found["ana"].severity is OK
    assert "unknown" in found["ana"].evidence


@pytest.mark.parametrize(
    ("policy", "ana", "severity"),
    [
        ("numa", ("optimized", "optimized"), WARNING),
        ("numa", (None, None), WARNING),
        ("numa", ("optimized", "non-optimized"), OK),
        ("round-robin", ("optimized", "optimized"), OK),
        ("queue-depth", ("optimized", "optimized"), OK),
    ],
)
def test_iopolicy(
    tree: Tree, policy: str, ana: tuple[str | None, str | None], severity: Severity
) -> None:
    two_paths(tree, policy, ana)
    found = judged(tree)["iopolicy"]
    assert found.severity is severity
    command = "echo round-robin > /sys/class/nvme-subsystem/nvme-subsys0/iopolicy"
    assert found.remedy == (command if severity is WARNING else "")


@pytest.mark.parametrize(
    ("ana", "severity", "evidence"),
    [
        (("optimized", "optimized"), OK, "nvme0c1n1 optimized"),
        (("optimized", "inaccessible"), WARNING, "nvme0c1n1 inaccessible"),
        (("non-optimized", "non-optimized"), WARNING, "nvme0c0n1 non-optimized"),
        (("optimized", None), WARNING, "nvme0c1n1 unknown"),
        ((None, None), OK, "unknown"),
    ],
)
def test_ana(
    tree: Tree, ana: tuple[str | None, str | None], severity: Severity, evidence: str
) -> None:
    two_paths(tree, ana=ana)
    found = judged(tree)["ana"]
    assert found.severity is severity
    assert evidence in found.evidence


@pytest.mark.parametrize(
    ("states", "severity"),
    [
        (("live", "live"), OK),
        (("live", "connecting"), WARNING),
        (("connecting", "resetting"), ERROR),
        (("live", ""), WARNING),
    ],
)
def test_controllers(tree: Tree, states: tuple[str, str], severity: Severity) -> None:
    for controller, state in zip(two_paths(tree), states, strict=True):
        (controller / "state").write_text(state)
    found = judged(tree)["controllers"]
    assert found.severity is severity
    assert f"nvme1 (10.0.1.2:4420) {states[1] or 'unknown'}" in found.evidence


@pytest.mark.parametrize(
    ("loss", "evidence"),
    [("600", "ctrl_loss_tmo, 600 s"), ("off", "forever"), ("", "unknown")],
)
def test_fast_io_fail_is_off(tree: Tree, loss: str, evidence: str) -> None:
    one_path(tree, ctrl_loss_tmo=loss)
    found = judged(tree)["fast_io_fail_tmo"]
    assert found.severity is WARNING
    assert evidence in found.evidence
    assert "echo 5 | tee /sys/class/nvme/nvme0/fast_io_fail_tmo" in found.remedy
    assert "--fast_io_fail_tmo=5 --ctrl-loss-tmo=600" in found.remedy


@pytest.mark.parametrize(("key", "severity"), [("", WARNING), ("1f2e3d4c", OK)])
def test_tls_and_authentication(tree: Tree, key: str, severity: Severity) -> None:
    one_path(tree, tls_key=key, dhchap_secret="DHHC-1:00:x:" if key else "none")
    found = judged(tree)
    for check, option in (("tls", "--tls"), ("authentication", "--dhchap-secret")):
        assert found[check].severity is severity
        assert (option in found[check].remedy) == (severity is WARNING)


def test_rdma_is_not_judged_on_security(tree: Tree) -> None:
    one_path(tree, transport="rdma", tls_key="", dhchap_secret="none")
    assert not {"tls", "authentication"} & set(judged(tree))


@pytest.mark.parametrize(
    ("options", "severity", "remedy"),
    [
        ("rw,noatime", OK, ""),
        ("ro", OK, ""),
        ("rw,relatime", OK, "mount -o remount,noatime /mnt/kv"),
        ("rw", WARNING, "mount -o remount,noatime /mnt/kv"),
    ],
)
def test_atime(tree: Tree, options: str, severity: Severity, remedy: str) -> None:
    tree.mount("/mnt/kv", "0:9", options=options)
    (found,) = judge_mount(tree.discover())
    assert (found.severity, found.remedy) == (severity, remedy)


@pytest.mark.parametrize(
    ("card", "severity"),
    [
        ({}, OK),
        ({"current_link_speed": "8.0 GT/s PCIe"}, WARNING),
        ({"current_link_width": "2"}, WARNING),
        ({"current_link_width": "Unknown", "current_link_speed": "Unknown"}, OK),
        ({"max_link_width": "255", "current_link_width": "63"}, OK),
    ],
)
def test_the_pcie_link_of_a_local_drive(
    tree: Tree, card: dict[str, str], severity: Severity
) -> None:
    local_nvme(tree, **card)
    (found,) = judge_pcie(tree.discover(), {})
    assert found.severity is severity
    assert ("lspci -vv -s 0000:01:00.0" in found.remedy) == (severity is WARNING)


def test_the_pcie_link_of_the_interface_of_a_path(tree: Tree) -> None:
    tree.nic("eth0", current_link_width="8", max_link_width="16", numa_node="1")
    one_path(tree, address="traddr=10.0.0.2,host_iface=eth0")
    fabric = tree.discover()
    nics = nics_of(fabric, tree.net)
    (found,) = judge_pcie(fabric, nics)
    assert found.severity is WARNING
    assert "eth0 runs at unknown GT/s x8" in found.evidence
    assert judge_pcie(fabric, {}) == []
    (found,) = judge_numa(fabric, nics, MACHINE)
    assert "eth0 on node 1; this process may run on node 0" in found.evidence


@pytest.mark.parametrize(
    ("cpus", "gpu_nodes", "severity", "remedy"),
    [
        ({0}, [], OK, ""),
        ({0, 2}, [0], OK, ""),
        ({2}, [], WARNING, "numactl --cpunodebind=0 --membind=0"),
        ({0}, [1], WARNING, "use a GPU on node 0"),
        ({0}, [0, 1], OK, ""),
        ({0}, [None], OK, ""),
    ],
)
def test_numa(
    tree: Tree, cpus: set[int], gpu_nodes: list[int | None], severity: Severity, remedy: str
) -> None:
    local_nvme(tree)
    gpus = tuple(Gpu(index, node) for index, node in enumerate(gpu_nodes))
    (found,) = judge_numa(tree.discover(), {}, replace(MACHINE, cpus=frozenset(cpus), gpus=gpus))
    assert found.severity is severity
    assert remedy in found.remedy
    assert bool(found.remedy) == bool(remedy)


def test_one_node_or_no_known_node_is_no_finding(tree: Tree) -> None:
    local_nvme(tree, numa_node="-1")
    assert judge_numa(tree.discover(), {}, MACHINE) == []
    one = replace(MACHINE, nodes={0: frozenset({0})})
    assert judge_numa(tree.discover(), {}, one) == []


@pytest.mark.parametrize(
    ("kernel", "targets", "severity", "evidence"),
    [
        ((6, 12), 4, OK, ""),
        ((6, 8), 1, OK, ""),
        ((6, 8), 2, WARNING, "each of 2 targets counts all staging"),
        ((5, 15), 1, WARNING, "completions interrupt"),
        ((5, 4), 1, WARNING, "runs on threads instead"),
        ((0, 0), 1, OK, "unknown"),
    ],
)
def test_the_kernel(
    kernel: tuple[int, int], targets: int, severity: Severity, evidence: str
) -> None:
    found = judge_kernel(replace(MACHINE, kernel=kernel), targets)
    assert found.severity is severity
    assert evidence in found.evidence
    assert ("or later" in found.remedy) == (severity is WARNING)


#: As the kernel writes a GID with an IPv4 address, here 10.0.0.1, and a link-local one.
GID_V4 = "0000:0000:0000:0000:0000:ffff:0a00:0001"
GID_V6 = "fe80:0000:0000:0000:cc14:f8ff:feb5:de07"


def judged_rdma(tree: Tree, *, mtu: str = "9000", **attributes: str) -> dict[str, Finding]:
    """The findings on one path of NVMe/RDMA by eth0."""
    tree.write(tree.nic("eth0"), {"mtu": mtu})
    given = {"transport": "rdma", "address": "traddr=10.0.0.2,host_iface=eth0", **attributes}
    one_path(tree, **given)
    fabric = tree.discover()
    ports = read_rdma_ports(str(tree.sysfs))
    return {one.check: one for one in judge_rdma(fabric, nics_of(fabric, tree.net), ports)}


def test_a_good_rdma_path_has_its_port_gid_and_mtu_named(tree: Tree) -> None:
    tree.rdma_port("rocep1", "eth0", GID_V6, f"{GID_V4}/IB/RoCE v1", GID_V4)
    found = judged_rdma(tree)
    assert {one.severity for one in found.values()} == {OK}
    assert "rocep1/1 on eth0 ACTIVE" in found["rdma_port"].evidence
    assert "GID 3 (10.0.0.1, RoCE v2)" in found["rdma_gid"].evidence
    assert "carries 4096 bytes" in found["rdma_mtu"].evidence


@pytest.mark.parametrize(
    ("check", "port", "mtu", "says"),
    [
        ("rdma_port", ("eth0", GID_V4), "9000", "eth0 DOWN"),
        ("rdma_port", ("eth1", GID_V4), "9000", "no RoCE port"),
        ("rdma_gid", ("eth0", GID_V6), "9000", "only fe80::cc14:f8ff:feb5:de07 (RoCE v2)"),
        ("rdma_gid", ("eth0", f"{GID_V4}/IB/RoCE v1"), "9000", "only 10.0.0.1 (IB/RoCE v1)"),
        ("rdma_mtu", ("eth0", GID_V4), "1500", "carries 1024 bytes"),
    ],
    ids=["down", "elsewhere", "link-local", "v1", "small"],
)
def test_what_slows_or_breaks_rdma_is_a_warning(
    tree: Tree, check: str, port: tuple[str, str], mtu: str, says: str
) -> None:
    tree.rdma_port("rocep1", *port, state="1: DOWN" if "DOWN" in says else "4: ACTIVE")
    found = judged_rdma(tree, mtu=mtu)
    assert [name for name, one in found.items() if one.severity is WARNING] == [check]
    assert says in found[check].evidence
    assert found[check].remedy


@pytest.mark.parametrize("transport", ["tcp", "rdma"])
def test_infiniband_and_tcp_have_no_findings_on_roce(tree: Tree, transport: str) -> None:
    gids = [GID_V4] if transport == "tcp" else []  # an InfiniBand port's name no interface
    tree.rdma_port("mlx5_0", "eth0", *gids)
    assert judged_rdma(tree, transport=transport) == {}


@pytest.mark.parametrize(
    ("mtu", "carried"), [(9000, 4096), (4192, 4096), (4191, 2048), (1500, 1024), (68, 0)]
)
def test_a_roce_packet_carries_a_power_of_two(mtu: int, carried: int) -> None:
    assert roce_payload_bytes(mtu) == carried
