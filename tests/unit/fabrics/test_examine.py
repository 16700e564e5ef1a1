# SPDX-License-Identifier: Apache-2.0
"""The order of an examination, and its tree for people."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import rich.tree
from rich.text import Text

from tests.unit.fabrics.trees import Tree, local_nvme, two_paths, without_multipath
from tests.unit.pool.offline_kit import write_pool
from vllm_nvmeof_offload.commands.doctor import examine, host
from vllm_nvmeof_offload.commands.doctor.examine import Examined, examine_target, outline
from vllm_nvmeof_offload.commands.doctor.host import nics_of
from vllm_nvmeof_offload.commands.doctor.measure import Measured
from vllm_nvmeof_offload.fabric.findings import Severity, worst
from vllm_nvmeof_offload.fabric.machine import Machine

MACHINE = Machine({}, frozenset({0}), (), (6, 12), "6.12")


def look_at(tree: Tree, target: Path, measured: bool = False) -> Examined:
    return examine_target(str(target), MACHINE, tree.net, (lambda _: None) if measured else None)


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
    first, _ = two_paths(tree, ana=("optimized", "inaccessible"))
    (first / "address").write_text("traddr=10.0.0.2,trsvcid=4420,host_iface=eth0\n")
    fabric = tree.discover()
    assert text_of(outline(fabric, nics_of(fabric, tree.net))) == (
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
    assert "!  its block device 259:9 is gone" in text_of(outline(tree.discover(), {}))


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
