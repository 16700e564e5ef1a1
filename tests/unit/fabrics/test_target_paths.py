# SPDX-License-Identifier: Apache-2.0
"""The watched part of a target: only the file system that the server has open."""

from __future__ import annotations

import shutil

from vllm_nvmeof_offload.targets.health import PathStates
from vllm_nvmeof_offload.targets.reattach import TargetPaths

from .trees import Tree, two_paths


def _watch(tree: Tree) -> TargetPaths:
    return TargetPaths("/mnt/kv", str(tree.sysfs), str(tree.mountinfo))


def test_states_are_read_again_each_time(tree: Tree) -> None:
    first, second = two_paths(tree)
    watch = _watch(tree)
    assert watch.states() == PathStates(known=2, carrying=2, best=2)
    (first / "state").write_text("connecting\n")
    assert watch.states() == PathStates(known=2, carrying=1, best=1)
    (second / "nvme0c1n1" / "ana_state").write_text("non-optimized\n")
    assert watch.states() == PathStates(known=2, carrying=1, best=0)
    (second / "nvme0c1n1" / "ana_state").write_text("inaccessible\n")
    assert watch.states() == PathStates(known=2, carrying=0, best=0)


def test_a_device_that_disappears_is_gone(tree: Tree) -> None:
    two_paths(tree)
    watch = _watch(tree)
    assert watch.states().device
    (tree.sysfs / "dev/block/259:1").unlink()
    assert not watch.states().device


def test_another_mount_counts_after_renew(tree: Tree) -> None:
    first, _ = two_paths(tree)
    watch = _watch(tree)
    watch.states()
    tree.mountinfo.write_text("")
    tree.mount("/mnt/kv", "0:77", "tmpfs", file_system="tmpfs")
    (first / "state").write_text("resetting\n")
    assert watch.states() == PathStates(known=2, carrying=1, best=1)
    watch.renew()
    assert watch.states() == PathStates(attachment=1)


def test_a_target_without_sysfs_has_no_path_states(tree: Tree) -> None:
    shutil.rmtree(tree.sysfs)
    assert _watch(tree).states() == PathStates()


def test_a_controller_that_is_removed_is_still_missed(tree: Tree) -> None:
    """After ctrl_loss_tmo the kernel removes the controller, and one path of two remains."""
    first, _ = two_paths(tree)
    watch = _watch(tree)
    watch.states()
    shutil.rmtree(first)
    assert watch.states() == PathStates(known=2, carrying=1, best=1)
    watch.renew()
    assert watch.states().known == 1, "attached again, one path is all that there is"
