# SPDX-License-Identifier: Apache-2.0
"""A server that reads for another one: over two links to the storage, and chunks over RDMA."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from tests.fabric.nvmet import PATHS, Timeouts
from tests.fabric.pair import LOADED_BYTES, Helper, Load, Loader
from tests.fabric.pulls import PULLED_BYTES
from tests.fabric.stage import READY_S_MAX, Stage

#: The ends of the link over which slots are pulled.
LENDING, PULLING = "far1", "near1"
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
    """NIXL pulls slots by RDMA from a process with another device, which counts the packets."""
    before = _sent()
    command = (sys.executable, "-m", "tests.fabric.pulls", f"r{LENDING}", f"r{PULLING}")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(_drivers())}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    stage.check(done.returncode == 0, f"the pulls end {done.stderr[-2000:] * done.returncode}")
    packets, link, messages = (now - then for now, then in zip(_sent(), before, strict=True))
    found = json.loads(done.stdout.splitlines()[-1])
    stage.record(f"{found}; {packets} RDMA packets; {link} bytes on the link, {messages} on lo")
    stage.equal("wrong slots", found["wrong"], 0)
    stage.equal("TCP ports at which an agent listens", found["listens"], [])
    stage.check(packets * RDMA_PACKET_BYTES >= PULLED_BYTES, "the RDMA device sent the slots")
    stage.check(PULLED_BYTES <= link <= 1.2 * PULLED_BYTES, "its link moved them once")
    stage.check(messages < PULLED_BYTES / 10, "the loopback interface did not")
    stage.check(found["after_kill"] != "done", "no pull from a killed process succeeds")
    stage.check(found["closed"], "the end of the agent ends it")


def _drivers() -> Path:
    """A directory that lets NIXL's wheel use soft-RoCE: docs/dual-path.md says why."""
    place = Path("/run/verbs")
    place.mkdir(exist_ok=True)
    bindings = find_spec("nixl_cu13")
    assert bindings is not None
    assert bindings.origin is not None
    (verbs,) = Path(bindings.origin).parents[1].glob("nixl_cu13.libs/libibverbs-*.so*")
    driver = Path("/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so")
    for name, file in (("libibverbs.so.1", verbs), (driver.name, driver)):
        (place / name).symlink_to(file)
    return place


def _sent() -> tuple[int, int, int]:
    """RDMA packets of the lending device, and bytes of its link and of the loopback interface."""
    counters = Path(f"/sys/class/infiniband/r{LENDING}/ports/1/hw_counters")
    links = [Path(f"/sys/class/net/{one}/statistics/tx_bytes") for one in (LENDING, "lo")]
    packets, *sent = (int(one.read_text()) for one in (counters / "sent_pkts", *links))
    return packets, sent[0], sent[1]
