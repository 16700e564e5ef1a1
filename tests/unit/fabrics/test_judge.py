# SPDX-License-Identifier: Apache-2.0
"""Each finding, where it belongs and where it does not; the order of an examination, and its
tree."""

from __future__ import annotations

import os
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import rich.tree
from rich.text import Text

from tests.unit.fabrics.trees import Tree, local_nvme, one_path, two_paths, without_multipath
from tests.unit.pool.kit import write_pool
from vllm_nvmeof_offload.commands.doctor import examine, host
from vllm_nvmeof_offload.commands.doctor.examine import Examined, examine_target, outline
from vllm_nvmeof_offload.commands.doctor.host import nics_of
from vllm_nvmeof_offload.commands.doctor.judge import (
    judge_kernel,
    judge_mount,
    judge_numa,
    judge_paths,
    judge_pcie,
    judge_rdma,
)
from vllm_nvmeof_offload.commands.doctor.measure import Measured
from vllm_nvmeof_offload.fabric import (
    Finding,
    Gpu,
    Machine,
    PcieLink,
    Severity,
    gpu_warnings,
    judge_gpus,
    read_gpus,
    read_machine,
    read_rdma_ports,
    roce_payload_bytes,
    worst,
)

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
    nics = nics_of(fabric)
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
    return {one.check: one for one in judge_rdma(fabric, nics_of(fabric), ports)}


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


ONE_NODE = Machine({}, frozenset({0}), (), (6, 12), "6.12")


def look_at(tree: Tree, target: Path, measured: bool = False) -> Examined:
    return examine_target(
        str(target),
        ONE_NODE,
        (lambda _: None) if measured else None,
        str(tree.sysfs),
        str(tree.mountinfo),
    )


def text_of(line: rich.tree.Tree, depth: int = 0) -> str:
    assert isinstance(line.label, Text)
    mark = {"green": "+", "yellow": "!", "": " "}[str(line.label.style)]
    below = "".join(text_of(one, depth + 1) for one in line.children)
    return f"{mark}{'  ' * depth}{line.label}\n{below}"


@pytest.mark.parametrize("dead", ["state", "ana", "gone"])
def test_a_target_without_a_live_path_is_not_touched(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: str
) -> None:
    target = tmp_path / "mount/pool"
    for controller in two_paths(tree):
        if dead == "state":
            (controller / "state").write_text("connecting\n")
        else:
            (path,) = controller.glob("nvme0c*n1")
            (path / "ana_state").write_text("inaccessible\n")
    if dead == "gone":
        (tree.sysfs / "dev/block/259:1").unlink()
    tree.mount(str(tmp_path / "mount"), "259:1")

    def touched(*_: object, **__: object) -> None:
        raise AssertionError("it would hang")

    realpath = os.path.realpath

    def resolve(path: str, strict: bool = False) -> str:
        assert not path.startswith(str(tmp_path / "mount")), "it would hang"
        return realpath(path, strict=strict)

    monkeypatch.setattr(host, "check_target", touched)
    monkeypatch.setattr(examine, "measure", touched)
    monkeypatch.setattr(examine.os.path, "realpath", resolve)
    found = look_at(tree, target, measured=True)
    assert worst(found.findings) is Severity.ERROR
    assert {one.check: one for one in found.findings}["target"].evidence.startswith("not touched")
    assert not target.exists()


def test_a_link_is_followed_once_it_is_safe(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "real" / "pool").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    local_nvme(tree)
    tree.mount(str(tmp_path / "real"), "259:1")
    found = look_at(tree, tmp_path / "link/pool")
    assert found.fabric.target == str(tmp_path / "link/pool")
    assert [one.device for one in found.fabric.namespaces] == ["nvme0n1"]
    assert {one.subject for one in found.findings} == {str(tmp_path / "link/pool")}


def test_a_measured_rate_is_compared_with_the_rate_of_the_links(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_nvme(tree)
    tree.mount(str(tmp_path), "259:1")
    half = 16e9 * 4 / 8 * 128 / 130 / 2
    made_up = Measured("io_uring", 2 << 20, half / 2, half, 0.001, 0.002, 50)
    monkeypatch.setattr(examine, "measure", lambda *_: made_up)
    found = look_at(tree, tmp_path, measured=True)
    shown = {one.check: one for one in found.findings}["measured"]
    assert shown.severity is Severity.OK
    assert "(25% of the links)" in shown.evidence
    assert "(50% of the links)" in shown.evidence
    assert "1.00 ms (median of 50, at most 2.00)" in shown.evidence
    assert look_at(tree, tmp_path).measured is None


def test_the_tree_of_two_paths_is_read_at_a_glance(tree: Tree) -> None:
    tree.nic("eth0", "25000")
    for controller, more in zip(
        two_paths(tree, ana=("optimized", "inaccessible")),
        ("traddr=10.0.0.2,host_iface=eth0", "traddr=10.0.1.2,host_traddr=192.0.2.99"),
        strict=True,
    ):
        (controller / "address").write_text(f"{more},trsvcid=4420\n")
    fabric = tree.discover()
    assert text_of(outline(fabric, nics_of(fabric))) == (
        " xfs at /mnt/kv (rw,noatime) on /dev/nvme0n1\n"
        "   namespace nvme0n1: nsid 1, 1.0 MiB, blocks of 512 B, transfers up to 1280 of 2048 KiB, "
        "uuid.11111111-2222-3333-4444-555555555555\n"
        "     subsystem nqn.2026-01.test:pool: KV pool, iopolicy numa\n"
        "+      path nvme0c0n1 by nvme0: tcp 10.0.0.2:4420, live, ANA optimized (group 1), "
        "eth0 (25 Gb/s), 9 queues, kato 5 s, fast_io_fail off, ctrl_loss 600 s\n"
        "!      path nvme0c1n1 by nvme1: tcp 10.0.1.2:4420, live, ANA inaccessible (group 1), "
        "interface unknown, 9 queues, kato 5 s, fast_io_fail off, ctrl_loss 600 s\n"
    )


def test_a_device_without_a_limit_of_its_own_shows_none(tree: Tree) -> None:
    two_paths(tree)
    (tree.sysfs / "dev/block/259:1/queue/max_hw_sectors_kb").write_text("2147483644\n")
    shown = text_of(outline(tree.discover(), {}))
    assert "transfers up to 1280 KiB, " in shown


def test_the_tree_of_a_stack_and_of_unknowns(tree: Tree) -> None:
    controller = without_multipath(tree)
    for path in controller.iterdir():
        if path.is_file():
            path.unlink()
    part = tree.partition(controller / "nvme0n1", "259:3")
    tree.dm("dm-0", "253:0", [part, tree.disk("sda", "8:0")])
    tree.mount("/mnt/lvm", "253:0", "/dev/mapper/kv")
    shown = text_of(outline(tree.discover("/mnt/lvm"), {})).splitlines()
    assert shown[1:4] == [
        "   dm dm-0, 1.0 MiB over nvme0n1p1, sda",
        "     partition nvme0n1p1, 512.0 KiB over nvme0n1",
        f"       {shown[3].strip()}",
    ]
    assert shown[3].strip().startswith("namespace nvme0n1")
    assert shown[5].strip().startswith("!") or "nvme0n1 by nvme0: transport unknown" in shown[5]
    assert shown[6] == "     disk sda, 1.0 MiB"


def test_a_device_that_is_gone_is_bad(tree: Tree) -> None:
    tree.mount("/mnt/kv", "259:9")
    assert "!  the block device 259:9 is gone" in text_of(outline(tree.discover(), {}))


def test_pools_on_a_target_are_named(tree: Tree, tmp_path: Path) -> None:
    target = tmp_path / "pool"
    target.mkdir(mode=0o700)
    assert not [one for one in look_at(tree, target).findings if one.check == "region"]
    (directory,) = write_pool(target)
    (found,) = [one for one in look_at(tree, target).findings if one.check == "region"]
    assert (found.severity, found.subject) == (Severity.OK, str(target))
    region = f"{directory.parts[-3][:12]}/engine-0/rank-0"
    assert found.evidence.startswith(f"{region}: lease free; generation 1, epoch ")
    assert found.evidence.endswith("; read by no process")


UUID = "0123456789abcdef0123456789abcdef"
#: Every call to NVML, and the answers of a made-up driver.
ANSWERS = {
    "nvmlInit": 0,
    "nvmlShutdown": 0,
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetPerformanceState": 0,
    "nvmlDeviceGetCurrPcieLinkGeneration": 4,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetName": "Made-up GPU",
    "nvmlDeviceGetUUID": "GPU-01234567-89ab-cdef-0123-456789abcdef",
    "nvmlDeviceGetPciInfo": types.SimpleNamespace(busId="00000000:3B:00.0"),
    "nvmlDeviceGetHandleByIndex": 0,
    "nvmlSystemGetDriverVersion": "580.95.05",
}


def made_up_nvml(**changed: object) -> types.ModuleType:
    nvml = types.ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def answering(value: object) -> object:
        def call(handle: int = 0) -> object:
            if value is None:
                raise NVMLError("not supported")
            return value

        return call

    for name, value in {**ANSWERS, **changed}.items():
        setattr(nvml, name, answering(value))
    nvml.NVMLError = NVMLError
    return nvml


def read(tree: Tree, monkeypatch: pytest.MonkeyPatch, **changed: object) -> Gpu:
    monkeypatch.setitem(sys.modules, "pynvml", made_up_nvml(**changed))
    tree.write(tree.sysfs / "bus/pci/devices/0000:3b:00.0", {"numa_node": "1"})
    (gpu,) = read_gpus(str(tree.sysfs))
    return gpu


def machine(gpu: Gpu, own: int = 1) -> Machine:
    nodes = {0: frozenset({0}), 1: frozenset({1})}
    return Machine(nodes, frozenset({own}), (gpu,), (6, 12), "6.12")


@pytest.mark.parametrize("bus", ["00000000:3B:00.0", b"00000000:3B:00.0"])
def test_link_and_place_are_read(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, bus: str | bytes
) -> None:
    gpu = read(tree, monkeypatch, nvmlDeviceGetPciInfo=types.SimpleNamespace(busId=bus))
    link = PcieLink("0000:3b:00.0", 16.0, 32.0, 16, 16, 1)
    assert gpu == Gpu(0, 1, "Made-up GPU", UUID, link, False, "580.95.05")


def test_all_gpus_are_read_and_none_without_a_driver(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []
    nvml = made_up_nvml(nvmlDeviceGetCount=2)
    nvml.nvmlShutdown = lambda: ended.append(True)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert [(one.index, one.numa_node) for one in read_machine(str(tree.sysfs)).gpus] == [
        (0, None),
        (1, None),
    ]
    assert ended
    monkeypatch.setitem(sys.modules, "pynvml", made_up_nvml(nvmlInit=None))
    assert read_machine(str(tree.sysfs)).gpus == ()


@pytest.mark.parametrize(
    ("changed", "severity", "evidence"),
    [
        ({}, WARNING, "Made-up GPU runs at 16 GT/s x16, but supports 32 GT/s x16"),
        ({"PerformanceState": 8}, OK, "it is idle"),
        # An idle link never reduces its number of lanes.
        ({"PerformanceState": 8, "CurrPcieLinkWidth": 8}, WARNING, "16 GT/s x8"),
        ({"CurrPcieLinkGeneration": 5}, OK, "32 GT/s x16"),
    ],
    ids=["slow", "idle", "narrow", "full"],
)
def test_the_link_of_a_gpu(
    tree: Tree,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, int],
    severity: Severity,
    evidence: str,
) -> None:
    answers = {f"nvmlDeviceGet{name}": value for name, value in changed.items()}
    link, _ = judge_gpus(machine(read(tree, monkeypatch, **answers)))
    assert (link.check, link.severity) == ("gpu_link", severity)
    assert evidence in link.evidence
    assert ("3b:00.0" in link.remedy) == (severity is WARNING)


def test_a_gpu_of_another_node_is_a_warning(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = read(tree, monkeypatch)
    here, away = (judge_gpus(machine(gpu, own))[1] for own in (1, 0))
    assert (here.check, here.severity) == ("gpu_node", OK)
    assert away.severity is WARNING
    assert "on node 1; this process may run on node 0" in away.evidence
    assert "--cpunodebind=1" in away.remedy


def test_values_that_a_gpu_does_not_report_are_not_judged(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = dict.fromkeys(
        name for name in ANSWERS if "Pcie" in name or "Performance" in name or "UUID" in name
    )
    gpu = read(tree, monkeypatch, **silent)
    assert gpu.uuid == "" and not gpu.is_idle
    assert [one.check for one in judge_gpus(machine(gpu))] == ["gpu_node"]


def test_start_up_warns_only_about_its_own_gpu(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(read(tree, monkeypatch), own=0)
    monkeypatch.setattr("vllm_nvmeof_offload.fabric.read_machine", lambda: here)
    assert [line.split(":")[0] for line in gpu_warnings(UUID)] == ["GPU 0", "GPU 0"]
    assert gpu_warnings("f" * 32) == ()


def test_nvidias_module_has_every_function_that_is_called() -> None:
    nvml = pytest.importorskip("pynvml")
    for name in (*ANSWERS, "NVMLError"):
        assert callable(getattr(nvml, name)), name
