# SPDX-License-Identifier: Apache-2.0
"""Discovery of the fabric, and several namespaces as one pool."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.fabric.nvmet import (
    HOST_NQN,
    IO_QUEUES,
    NQN,
    PATHS,
    PORT,
    RdmaLinks,
    Timeouts,
    address,
    run,
)
from tests.fabric.stage import Stage
from vllm_nvmeof_offload.fabric import Finding, Severity, discover, read_rdma_ports


def fabric_discovered(stage: Stage) -> None:
    """`discover` reports the fabric as the scenario configured it."""
    timeouts = Timeouts(ctrl_loss_tmo=90, fast_io_fail_tmo=7, keep_alive_tmo=3, reconnect_delay=2)
    (target,) = stage.connect(timeouts)
    stage.fabric.set_ana(2, "non-optimized")
    stage.pass_time(1)
    seen = asdict(discover(str(target)))
    mount, (namespace,) = seen["mount"], seen["namespaces"]
    stage.equal("file system", mount["file_system"], "xfs")
    stage.check("noatime" in mount["options"], "mount options: noatime")
    stage.equal("device", f"/dev/{namespace['device']}", str(stage.fabric.device(1)))
    stage.equal("namespace", (namespace["nsid"], namespace["multipath"]), (1, True))
    subsystem = namespace["subsystem"]
    stage.equal("subsystem", (subsystem["nqn"], subsystem["iopolicy"]), (NQN, "numa"))
    controllers = sorted(subsystem["controllers"], key=lambda one: one["traddr"])
    for path, controller in enumerate(controllers, start=1):
        where = (controller["transport"], controller["traddr"], controller["trsvcid"])
        stage.equal(f"path {path}", where, (stage.fabric.transport, address(path), str(PORT)))
        stage.equal("host", controller["hostnqn"], HOST_NQN)
        found = tuple(
            controller[key]
            for key in ("state", "ctrl_loss_tmo", "fast_io_fail_tmo", "kato", "reconnect_delay")
        )
        stage.equal("state and timeouts", found, ("live", 90, 7, 3, 2))
        queues = 1 + min(IO_QUEUES, os.cpu_count() or 1)  # the first is the admin queue
        stage.equal("queues", controller["queue_count"], queues)
    states = {one["controller"]: one["ana_state"] for one in namespace["paths"]}
    found = tuple(states[controller["name"]] for controller in controllers)
    stage.equal("ANA states", found, ("optimized", "non-optimized"))


def rdma_judged(stage: Stage) -> None:
    """The doctor names port, GID and MTU of each NVMe/RDMA path, and warns of small packets."""
    (target,) = stage.connect(Timeouts())
    found = _judge(target)
    stage.equal(
        "checks", sorted({one.check for one in found}), ["rdma_gid", "rdma_mtu", "rdma_port"]
    )
    stage.equal("severities", {one.severity for one in found}, {Severity.OK})
    text = "; ".join(one.evidence for one in found)
    for path in PATHS:
        stage.check(
            f"rnear{path}/1 on near{path} ACTIVE" in text, f"port {path} is named in: {text}"
        )
        stage.check(f"(10.99.{path}.1, RoCE v2)" in text, f"GID {path} is named")
        stage.check(f"near{path} has MTU {RdmaLinks.MTU}" in text, f"MTU {path} is named")
    stage.check("carries 4096 bytes" in text, "packets are large")
    run("ip", "link", "set", "near1", "mtu", "1500")
    worse = [one for one in _judge(target) if one.severity is Severity.WARNING]
    run("ip", "link", "set", "near1", "mtu", str(RdmaLinks.MTU))
    stage.equal("warnings", [one.check for one in worse], ["rdma_mtu"])
    stage.check("carries 1024 bytes" in worse[0].evidence, worse[0].evidence)


def _judge(target: Path) -> list[Finding]:
    # Not at the start of each boot: in the guest this takes eight seconds.
    from vllm_nvmeof_offload.commands.doctor.host import nics_of
    from vllm_nvmeof_offload.commands.doctor.judge import judge_rdma

    fabric = discover(str(target))
    return list(judge_rdma(fabric, nics_of(fabric), read_rdma_ports()))


def work_follows_speed(stage: Stage) -> None:
    """One of two namespaces is twice as fast and gets about twice the writes."""
    targets = stage.connect(Timeouts(), (1, 2))
    stage.fabric.slow_disk(1, 200)
    stage.fabric.slow_disk(2, 400)
    child = stage.load(*targets, loads=False, interval_s=0.01, slots=96)
    stage.pass_time(4)  # until both rates are known
    since_s = time.monotonic()
    stage.pass_time(8)
    stage.fabric.slow_disk(1, 0)
    stage.fabric.slow_disk(2, 0)
    done = Counter(op.target for op in child.between(since_s) if op.kind == "write")
    ratio = done[0] / done[1]
    stage.check(1.5 <= ratio <= 2.7, f"writes went {ratio:.2f} : 1 ({done[0]} and {done[1]})")
    stage.only_ok(since_s, "no operation fails")
    stage.finish_load()


def one_of_two_hangs(stage: Stage) -> None:
    """One of two namespaces hangs: the other one serves as before."""
    targets = stage.connect(Timeouts(), (1, 2))
    child = stage.load(*targets, interval_s=0.05)
    stage.pass_time(1)
    stage.record("the device of namespace 2 hangs")
    stage.fabric.hang_disk(2)
    stage.until_verdict("suspect", within_s=5, target=1)
    since_s = time.monotonic()
    stage.pass_time(6)
    others = [op for op in child.between(since_s) if op.target == 0]
    worst_s = max(op.seconds for op in others)
    stage.check(  # a wait for the hung one would last until a deadline; a busy host is slow too
        all(op.outcome == "ok" for op in others) and worst_s < child.spec.read_deadline_s,
        f"all {len(others)} operations on target 0 succeed (worst {worst_s:.2f} s)",
    )
    stage.check(stage.verdict(0) in ("ok", "degraded"), "target 0 stays usable")
    stage.record("the device answers again")
    stage.fabric.hang_disk(2, on=False)
    stage.until_verdict("ok", "degraded", within_s=20, target=1)
    stage.recovers(within_s=5, targets=2)
    stage.finish_load()
