# SPDX-License-Identifier: Apache-2.0
"""vLLM's face of the manager: look-ups are counted by source, every figure is declared."""

from __future__ import annotations

from collections import Counter

import pytest

from vllm_nvmeof_offload.metrics import COUNTERS, GAUGES

from .bench import Bench, keys_of

pytest.importorskip("vllm", reason="the face needs vLLM's types")

from vllm.v1.kv_offload.base import LookupResult, ReqContext

from vllm_nvmeof_offload.vllm_adapter import manager as face
from vllm_nvmeof_offload.vllm_adapter.manager import NVMeoFOffloadingManager


def figures(manager: NVMeoFOffloadingManager) -> dict[tuple[str, tuple[str, ...]], float]:
    """What `get_stats` counts, by our name and label values."""
    counted: dict[tuple[str, tuple[str, ...]], float] = {}

    class Stats:
        def increase_counter(self, name: str, value: float, labels: tuple[str, ...]) -> None:
            counted[name.removeprefix("vllm:nvmeof_"), labels] = value

        def set_gauge(self, name: str, value: float, labels: tuple[str, ...]) -> None:
            assert len(labels) == len(GAUGES[name.removeprefix("vllm:nvmeof_")].labels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(face, "OffloadingConnectorStats", Stats)
        manager.get_stats()
    for name, labels in counted:
        assert len(COUNTERS[name].labels) == len(labels)
    return counted


def test_look_ups_are_counted_by_source() -> None:
    bench = Bench(cache=1)
    bench.store(1)
    bench.write_all()
    bench.store(2)
    manager = NVMeoFOffloadingManager(bench.core, 16)
    context = ReqContext("request")
    found = [manager.lookup(key, context) for key in keys_of(1, 2, 3, 2)]
    assert found == [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS, LookupResult.HIT]
    counted = figures(manager)
    sources = {labels[0]: n for (name, labels), n in counted.items() if name == "lookups"}
    assert sources == {"pool": 1, "cpu": 2, "miss": 1}
    assert not any(name == "lookups" for name, _ in figures(manager)), "counted once"


def test_bytes_written_are_counted_by_target() -> None:
    manager = NVMeoFOffloadingManager(Bench().core, 16)
    manager.report([], Counter({"written_bytes:0": 5, "written_bytes:1": 7, "read_bytes": 2}))
    counted = figures(manager)
    assert counted["written_bytes", ()] == 12
    assert counted["target_written_bytes", ("0",)] == 5
    assert counted["target_written_bytes", ("1",)] == 7
    assert counted["read_bytes", ()] == 2


def test_a_chunk_below_the_threshold_is_counted() -> None:
    bench = Bench(store_threshold=2)
    manager = NVMeoFOffloadingManager(bench.core, 16)
    assert manager.prepare_store(keys_of(1, 2), ReqContext("request")).keys_to_store == []
    assert figures(manager)["below_threshold_chunks", ()] == 2


def test_of_requests_computed_with_earlier_weights_nothing_is_stored() -> None:
    bench = Bench()
    manager = NVMeoFOffloadingManager(bench.core, 16)
    old, new = ReqContext("old"), ReqContext("new")
    assert manager.weights_may_have_changed(known=True)
    manager.reset_cache()
    bench.core.suspension.begin("update_weights", ["old"], known=True)
    assert manager.prepare_store(keys_of(1), old).keys_to_store == []
    assert manager.prepare_store(keys_of(2), new).keys_to_store == keys_of(2)
    assert bench.core.gauges()["stores_suspended"] == 1
    manager.on_request_finished(old)  # its name may be used again
    assert manager.prepare_store(keys_of(1), old).keys_to_store == keys_of(1)
    assert bench.core.gauges()["stores_suspended"] == 0


@pytest.mark.parametrize("never_change", [False, True])
def test_what_may_change_weights_voids_unless_the_operator_rules_it_out(never_change: bool) -> None:
    manager = NVMeoFOffloadingManager(Bench(weights_never_change=never_change).core, 16)
    assert manager.weights_may_have_changed(known=False) is not never_change
    assert manager.weights_may_have_changed(known=True)
