# SPDX-License-Identifier: Apache-2.0
"""Every scenario by name, and the scenarios of each boot of the guest."""

from __future__ import annotations

from collections.abc import Callable

from tests.fabric.scenarios import clients, devices, leases, outages, paths, peers, pools
from tests.fabric.stage import Stage

__all__ = ["BOOTS", "IN_REAL_TIME", "SCENARIOS"]

SCENARIOS: dict[str, Callable[[Stage], None]] = {
    "fabric-discovered": pools.fabric_discovered,
    "rdma-judged": pools.rdma_judged,
    "work-follows-speed": pools.work_follows_speed,
    "one-of-two-hangs": pools.one_of_two_hangs,
    "path-lost": paths.path_lost,
    "port-removed": paths.port_removed,
    "ana-change": paths.ana_change,
    "controller-reset": paths.controller_reset,
    "all-lost-briefly": outages.all_lost_briefly,
    "all-lost-past-fast-io-fail": outages.all_lost_past_fast_io_fail,
    "all-lost-past-ctrl-loss": outages.all_lost_past_ctrl_loss,
    "killed-while-lost": outages.killed_while_lost,
    "default-timeouts": outages.default_timeouts,
    "huge-pages-written": devices.huge_pages_written,
    "namespace-disabled": devices.namespace_disabled,
    "medium-fails": devices.medium_fails,
    "medium-hangs": devices.medium_hangs,
    "medium-hangs-past-io-timeout": devices.medium_hangs_past_io_timeout,
    "caches-apart": clients.caches_apart,
    "leased-region-followed": leases.leased_region_followed,
    "leased-region-without-log": leases.leased_region_without_log,
    "leased-region-of-killed-owner": leases.leased_region_of_killed_owner,
    "leased-region-of-stopped-owner": leases.leased_region_of_stopped_owner,
    "leased-region-taken-over": leases.leased_region_taken_over,
    "dual-path": peers.dual_path,
    "pulled-by-verbs": peers.pulled_by_verbs,
    "disconnected-while-mounted": devices.disconnected_while_mounted,
}

#: As many guests as this machine has processors run at the same time, with one processor each and
#: similar duration. Entries: NAME:ENGINE on NVMe/TCP, NAME:ENGINE:rdma on NVMe/RDMA.
BOOTS: tuple[tuple[str, ...], ...] = (
    (
        "fabric-discovered:none",
        "huge-pages-written:none",
        "work-follows-speed:uring",
        "path-lost:uring",
        "port-removed:uring",
        "ana-change:uring",
        "controller-reset:uring",
        "all-lost-briefly:uring",
        "all-lost-past-ctrl-loss:threads",
        "medium-fails:uring",
        "medium-hangs:uring",
        "one-of-two-hangs:uring",
        "one-of-two-hangs:threads",
        "killed-while-lost:uring",
        "dual-path:uring",
    ),
    (
        "all-lost-past-ctrl-loss:uring",
        "all-lost-past-fast-io-fail:uring",
        "namespace-disabled:uring",
        "disconnected-while-mounted:uring",
        "medium-hangs-past-io-timeout:uring",
        "default-timeouts:uring",
        "caches-apart:none",
        "leased-region-followed:uring",
        "leased-region-without-log:uring",
        "leased-region-of-killed-owner:uring",
        "leased-region-of-stopped-owner:uring",
        "leased-region-taken-over:uring",
    ),
    (
        "fabric-discovered:none:rdma",
        "rdma-judged:none:rdma",
        "path-lost:uring:rdma",
        "port-removed:uring:rdma",
        "ana-change:uring:rdma",
        "controller-reset:uring:rdma",
        "all-lost-briefly:uring:rdma",
        "all-lost-past-fast-io-fail:uring:rdma",
        "all-lost-past-ctrl-loss:threads:rdma",
    ),
    (
        "medium-fails:uring:rdma",
        "medium-hangs:uring:rdma",
        "medium-hangs-past-io-timeout:uring:rdma",
        "namespace-disabled:uring:rdma",
        "one-of-two-hangs:uring:rdma",
        "killed-while-lost:uring:rdma",
        "disconnected-while-mounted:uring:rdma",
    ),
    ("pulled-by-verbs:none:rdma",),
)
#: These start programs that have deadlines. Under virtual time reading such a program from the
#: outer machine takes longer. Their guests run after the others, with two processors.
IN_REAL_TIME = frozenset({"pulled-by-verbs:none:rdma"})
