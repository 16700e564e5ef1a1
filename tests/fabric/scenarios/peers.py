# SPDX-License-Identifier: Apache-2.0
"""A server that reads for another one: over two links to the storage, and chunks over RDMA."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from tests.fabric.nvmet import PATHS, Timeouts
from tests.fabric.pair import LOADED_BYTES, Helper, Load, Loader
from tests.fabric.stage import READY_S_MAX, Stage

#: The link over which chunks are pulled; the pool's I/O takes the other path.
PULLING, SERVING = "near1", "far1"
#: What the first of these tests pulls at least: whole slots, with their headers.
PULLED_BYTES = 80 * (24_000 + 4096)
PULLS = ("tests/faults/peers/test_peers.py", "tests/unit/test_peer_transport.py")
PULLS_CHOSEN = "verbs and (owner_stored or generation or deadline or killed) or listens"
PULLS_COUNT = 5
RDMA_PACKET_BYTES = 4096
#: Of each link: so slow that it is what a load waits for, on an emulated processor too.
LINK_BYTES_PER_S = 4_000_000
ROUNDS = 3
WARM_LOADS_MAX = 10
RATIO_MIN = 1.7
#: Of a load, what each of both links has at least.
SHARE_MIN = 0.4
#: Of its link, what a load over that alone gets: headers and the start of a load take the rest.
ALONE_MIN = 0.8


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
    """NIXL pulls chunks by RDMA from a process with another device, which counts the packets."""
    (target,) = stage.connect(Timeouts(keep_alive_tmo=None))
    stage.fabric.set_ana(1, "inaccessible")
    environment = {
        "LD_LIBRARY_PATH": str(_drivers()),
        "UCX_NET_DEVICES": f"r{PULLING}:1",
        "VLLM_NVMEOF_SERVING_DEVICES": f"r{SERVING}:1",
    }
    before = _sent_packets(), _sent_bytes("lo")
    _pull(stage, target, environment)
    after = _sent_packets(), _sent_bytes("lo")
    packets, messages = (now - then for now, then in zip(after, before, strict=True))
    stage.record(f"{packets} RDMA packets, and {messages} bytes on the loopback interface")
    stage.check(packets * RDMA_PACKET_BYTES >= PULLED_BYTES, "the RDMA device sent the chunks")
    stage.check(messages < PULLED_BYTES / 2, "messages did not")


def _drivers() -> Path:
    """A directory that lets NIXL's wheel use soft-RoCE: docs/dual-path.md says why."""
    place = Path("/run/verbs")
    place.mkdir(exist_ok=True)
    bindings = find_spec("nixl_cu13")
    assert bindings is not None
    assert bindings.origin is not None
    packages = Path(bindings.origin).parents[1]
    (verbs,) = packages.glob("nixl_cu13.libs/libibverbs-*.so*")
    driver = Path("/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so")
    for name, file in (("libibverbs.so.1", verbs), (driver.name, driver)):
        if not (place / name).exists():
            (place / name).symlink_to(file)
    return place


def _pull(stage: Stage, target: Path, more: dict[str, str]) -> None:
    """Run the tests of pulls with their files on `target`, and check that all pass."""
    options = ("-q", "-n", "0", "-p", "no:cacheprovider", "--basetemp", str(target / "pytest"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *PULLS, "-k", PULLS_CHOSEN],
        capture_output=True,
        text=True,
        env={**os.environ, **more},
    )
    if done.returncode:
        print(done.stdout, done.stderr, flush=True)
    last = done.stdout.strip().rpartition("\n")[2]
    stage.check(last.startswith(f"{PULLS_COUNT} passed"), f"pulls by verbs: {last}")


def _sent_packets() -> int:
    counters = Path(f"/sys/class/infiniband/r{SERVING}/ports/1/hw_counters")
    return int((counters / "sent_pkts").read_text())


def _sent_bytes(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())
