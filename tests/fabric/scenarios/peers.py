# SPDX-License-Identifier: Apache-2.0
"""A server that reads for another one: over two links to the storage, and chunks over RDMA."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from tests.fabric.nvmet import PATHS, Timeouts, run
from tests.fabric.pair import LOADED_BYTES, Helper, Load, Loader
from tests.fabric.stage import READY_S_MAX, Stage

#: Of each link: so slow that it is what a load waits for, on an emulated processor too.
LINK_BYTES_PER_S = 4_000_000
ROUNDS = 3
WARM_LOADS_MAX = 10
RATIO_MIN = 1.7
#: Of a load, what each of both links has at least.
SHARE_MIN = 0.4
#: Of its link, what a load over that alone gets: headers and the start of a load take the rest.
ALONE_MIN = 0.8
#: Of a load by RDMA; a peer has half of it.
DEADLINE_S = 12.0
#: In LD_LIBRARY_PATH from the start of this process, which keeps that variable.
LIBRARIES = Path("/run/verbs")
DISK = "/dev/mapper/disk1"
_FORK = get_context("fork")


def dual_path(stage: Stage) -> None:
    """A load over its own link and over that of a second server takes little more than half."""
    stage.fabric.part_paths()
    near, far = stage.connect(Timeouts(), targets=PATHS)
    with Loader(near) as loader:
        # The second namespace is the same pool behind the other link: what one host writes to a
        # pool, the kernel of the other one reads, and here is one kernel.
        shutil.copytree(near, far, dirs_exist_ok=True)
        os.sync()
        with Helper(far) as helper:
            for path in PATHS:
                stage.fabric.limit(path, LINK_BYTES_PER_S)
            loader.connect(helper.ready)
            _warm(stage, loader)
            _compare(stage, loader)


def _warm(stage: Stage, loader: Loader) -> None:
    """Load until both links' rates are known and all that the load runs is in memory."""
    _load(stage, loader, with_peer=False)
    for _ in range(WARM_LOADS_MAX):
        stage.until(loader.is_connected, READY_S_MAX, "the two processes are connected")
        load, _ = _load(stage, loader, with_peer=True)
        if load.pulled_bytes > SHARE_MIN * LOADED_BYTES and loader.is_connected():
            return
    stage.check(False, f"the peer brings its share in one of {WARM_LOADS_MAX} loads")


def _compare(stage: Stage, loader: Loader) -> None:
    alone, both = [], []
    for number in range(ROUNDS):
        for with_peer in (number % 2 == 0, number % 2 == 1):
            load, moved = _load(stage, loader, with_peer=with_peer)
            (both if with_peer else alone).append(load.seconds)
            if with_peer:
                least = min(moved) / LOADED_BYTES
                stage.check(least >= SHARE_MIN, f"each link moves {SHARE_MIN:g} of the load")
            else:
                stage.equal("bytes that the peer has brought", load.pulled_bytes, 0)
    reached = LOADED_BYTES / LINK_BYTES_PER_S / median(alone)
    stage.check(ALONE_MIN <= reached <= 1, f"a load alone waits for its link ({reached:.2f})")
    ratio = median(alone) / median(both)
    stage.check(ratio >= RATIO_MIN, f"both links are {RATIO_MIN:g} times one ({ratio:.2f})")


def _load(stage: Stage, loader: Loader, *, with_peer: bool) -> tuple[Load, list[int]]:
    """One load, all bytes of which are right; and what each link has moved meanwhile."""
    before = [stage.fabric.received_bytes(path) for path in PATHS]
    load = loader.load(with_peer=with_peer)
    moved = [stage.fabric.received_bytes(path) - at for path, at in zip(PATHS, before, strict=True)]
    links = " and ".join(f"{size / 1e6:.1f}" for size in moved)
    what = "both links" if with_peer else "its own link"
    stage.record(f"a load over {what} takes {load.seconds:.2f} s; the links move {links} MB")
    stage.equal("wrong chunks", load.wrong, 0)
    return load, moved


def pulled_by_verbs(stage: Stage) -> None:
    """NIXL pulls by RDMA from processes that lie, are slow, stop, are killed or are cut off."""
    target = Path("/mnt/pulls")
    target.mkdir()
    # Not behind the fabric: NVMe's timeouts would pass while the emulated processor is busy.
    run("mkfs.xfs", "-q", "-f", "-K", DISK)
    run("mount", DISK, str(target))
    stage.mounted.append(target)
    _let_nixl_find_its_driver()
    pipe, far = _FORK.Pipe()
    process = _FORK.Process(target=_pull, args=(target, far))
    process.start()
    far.close()
    found = pipe.recv()
    process.join()
    for what, load in found.loads.items():
        stage.record(f"a load, {what}: {load}")
    helped, cut, again, killed = found.loads.values()
    stage.check(min(helped.pulled_bytes, again.pulled_bytes) > 0, "a peer brings chunks")
    stage.check(cut.seconds >= DEADLINE_S / 2, "pulls over a cut link hang")
    stage.check(cut.seconds < DEADLINE_S, "the pool is read within the deadline instead")
    stage.check(killed.seconds < DEADLINE_S / 2, "and at once if the peer is killed")
    stage.equal("wrong chunks", [load.wrong for load in found.loads.values()], [0] * 4)
    for name, (seconds, failure) in found.tests.items():
        stage.record(f"{seconds:.1f} s: {name.rpartition('::')[2]}{failure}")
    stage.equal("tests", len(found.tests), found.chosen)
    stage.equal("failed tests", [n for n, (_, failure) in found.tests.items() if failure], [])


def _pull(target: Path, pipe: Connection) -> None:
    from tests.fabric.pulls import pull

    pipe.send(pull(target, DEADLINE_S))
    os._exit(0)  # without the libraries' destructors (docs/troubleshooting.md)


def _let_nixl_find_its_driver() -> None:
    """Let NIXL's wheel use soft-RoCE, as in docs/dual-path.md."""
    bindings = find_spec("nixl_cu13")
    assert bindings is not None
    assert bindings.origin is not None
    (verbs,) = Path(bindings.origin).parents[1].glob("nixl_cu13.libs/libibverbs-*.so*")
    driver = Path("/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so")
    for name, file in (("libibverbs.so.1", verbs), (driver.name, driver)):
        (LIBRARIES / name).symlink_to(file)
    # Each process would look for all of them on the outer machine.
    for other in set(Path("/etc/libibverbs.d").iterdir()) - {Path("/etc/libibverbs.d/rxe.driver")}:
        other.unlink()
