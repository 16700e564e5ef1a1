# SPDX-License-Identifier: Apache-2.0
"""The manager that vLLM calls: look-ups are counted by source, every metric is declared."""

from __future__ import annotations

import pytest

from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.manager.core import CoreConfig
from vllm_nvmeof_offload.manager.look_up import Queue
from vllm_nvmeof_offload.metrics import CONFIG_LABELS, COUNTERS, GAUGES, Counts
from vllm_nvmeof_offload.protocol import ResetCommand

from .bench import GROUPS, KEY_BYTES, TAG, attached, hello, key, keys_of

pytest.importorskip("vllm", reason="the face needs vLLM's types")

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_nvmeof_offload.vllm_adapter import manager as face
from vllm_nvmeof_offload.vllm_adapter.manager import NVMeoFOffloadingManager


def figures(manager: NVMeoFOffloadingManager) -> dict[tuple[str, tuple[str, ...]], float]:
    """The counts of `get_stats`, by our name and label values."""
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


class Face:
    """The adapter over a bench's core: the adapter makes the core, and the bench drives it."""

    def __init__(self, cache: int = 4, **config: object) -> None:
        self.manager = NVMeoFOffloadingManager(
            CoreConfig(**config)  # type: ignore[arg-type]
        )
        one, groups = hello(0, cache, 8, (), target_count=2), (Group(0, GroupKind.FULL, 16),)
        self.bench = attached(self.manager, one, KEY_BYTES, groups)


def test_look_ups_are_counted_by_source() -> None:
    face = Face(cache=1)
    bench, manager = face.bench, face.manager
    bench.store(1)
    bench.write_all()
    bench.store(2)
    context = ReqContext("request")
    found = [manager.lookup(key, context) for key in keys_of(1, 2, 3, 2)]
    assert found == [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS, LookupResult.HIT]
    counted = figures(manager)
    sources = {labels[0]: n for (name, labels), n in counted.items() if name == "lookups"}
    assert sources == {"pool": 1, "cpu": 2, "miss": 1, "shared": 0}
    assert not any(name == "lookups" for name, _ in figures(manager)), "counted once"


def test_the_tokens_of_a_load_are_counted_by_the_tier_that_they_come_from() -> None:
    face = Face(cache=1)
    bench, manager = face.bench, face.manager
    bench.store(1)
    bench.write_all()
    bench.store(2)
    context = ReqContext("request")
    manager.prepare_load(keys_of(1, 2), context)
    both = {CacheHitSource.DISK: 16, CacheHitSource.HOST: 16}
    assert manager.load_sources(context, 48, 32) == both
    within = manager.load_sources(context, 48 + 5, 32 - 5 - 3)
    assert within == {CacheHitSource.DISK: 11, CacheHitSource.HOST: 13}
    assert manager.load_sources(context, 48, 0) == {}
    assert manager.load_sources(ReqContext("nothing was loaded"), 48, 32) == {}


def test_bytes_written_are_counted_by_target() -> None:
    manager = Face().manager
    manager.report([], Counts({("target_written_bytes", "0"): 5}))
    manager.report([], Counts({("target_written_bytes", "1"): 7}))
    manager.report([], Counts({("transfer_seconds", "load", "pool"): 1.5}))
    counted = figures(manager)
    assert counted["target_written_bytes", ("0",)] == 5
    assert counted["target_written_bytes", ("1",)] == 7
    assert counted["transfer_seconds", ("load", "pool")] == 1.5


def test_a_chunk_below_the_threshold_is_counted() -> None:
    manager = Face(store_threshold=2).manager
    assert manager.prepare_store(keys_of(1, 2), ReqContext("request")).keys_to_store == []
    assert figures(manager)["unstored_chunks", ("below_threshold",)] == 2


def test_requests_computed_with_earlier_weights_are_not_stored() -> None:
    manager = Face().manager
    old, new = ReqContext("old"), ReqContext("new")
    assert manager.weights_may_have_changed(known=True)
    manager.reset_cache()
    manager.suspension.begin("update_weights", ["old"], known=True)
    assert manager.prepare_store(keys_of(1), old).keys_to_store == []
    assert manager.prepare_store(keys_of(2), new).keys_to_store == keys_of(2)
    assert len(manager.suspension.requests) == 1
    manager.on_request_finished(old)  # its name may be used again
    assert manager.prepare_store(keys_of(1), old).keys_to_store == keys_of(1)
    assert len(manager.suspension.requests) == 0


@pytest.mark.parametrize("never_change", [False, True])
def test_a_call_that_may_change_weights_resets_unless_the_operator_rules_it_out(
    never_change: bool,
) -> None:
    manager = Face(weights_never_change=never_change).manager
    assert manager.weights_may_have_changed(known=False) is not never_change
    assert manager.weights_may_have_changed(known=True)


def the_reset(manager: NVMeoFOffloadingManager) -> ResetCommand:
    manager.reset_cache()
    (reset,) = manager.take_commands()
    assert isinstance(reset, ResetCommand)
    return reset


def test_equal_names_on_servers_of_one_keyspace_give_equal_tags() -> None:
    tags = {}
    for keyspace in ("a" * 32, "b" * 32):
        for version in ("step-1", "step-2"):
            managers = [NVMeoFOffloadingManager(CoreConfig()) for _ in range(2)]
            for manager in managers:
                manager.attach([hello(0, 4, 8, (), keyspace=keyspace)], KEY_BYTES, GROUPS)
                assert manager.name_weights(version)
                assert not manager.name_weights(version), "they have it already"
            one, other = map(the_reset, managers)
            assert (one.tag, one.named) == (other.tag, other.named) == (one.tag, True)
            tags[keyspace, version] = one.tag
    assert len({TAG, *tags.values()}) == 5


def test_a_name_is_logged_and_says_who_shares(caplog: pytest.LogCaptureFixture) -> None:
    manager = Face().manager
    manager.name_weights("step-1")
    with caplog.at_level("INFO"):
        text = manager.who_shares()
    assert "'step-1'" in text
    assert "it loads none of theirs" in text
    assert text in caplog.text


def test_a_server_whose_start_has_no_name_takes_none(caplog: pytest.LogCaptureFixture) -> None:
    """Hashes with a seed, dummy weights, adapters by path: the name would promise too much."""
    manager = NVMeoFOffloadingManager(CoreConfig(weights_never_change=True))
    manager.attach([hello(0, 4, 8, (), tag=b"")], KEY_BYTES, GROUPS)
    assert not manager.name_weights("step-1")
    with caplog.at_level("WARNING"):
        assert "no effect: its weights or block hashes have no name" in manager.who_shares()
    assert "no effect" in caplog.text
    assert not the_reset(manager).named


def test_before_the_handshake_the_manager_does_and_exports_nothing() -> None:
    """Every call that vLLM can make without a request; calls with one are errors."""
    manager = NVMeoFOffloadingManager(CoreConfig())
    context = ReqContext("request")
    assert manager.on_new_request(context) == RequestOffloadingContext()
    manager.on_request_finished(context)
    assert not manager.has_pending_work()
    assert not manager.has_events
    assert list(manager.take_events()) == []
    assert manager.get_stats() is None
    assert set(manager.config_info()[0]) == set(CONFIG_LABELS)
    assert manager.waiting is None
    manager.reset_cache()
    manager.shutdown()
    for call in (
        lambda: manager.lookup(OffloadKey(b"1"), context),
        lambda: manager.prepare_store([], context),
        manager.take_commands,
        lambda: manager.report([], Counts()),
    ):
        with pytest.raises(AssertionError):
            call()
    queue = Queue({}.get, lambda *_: [], lambda *_: False, GROUPS)
    manager.attach([hello(0, 4, 8, ())], KEY_BYTES, GROUPS, queue)
    assert manager.waiting is not None
    assert manager.has_pending_work(), "one step exports every series"
    with pytest.raises(AssertionError, match="second"):
        manager.attach([hello(0, 4, 8, ())], KEY_BYTES, GROUPS)


@pytest.mark.parametrize("new_weights", [False, True])
def test_a_reset_before_the_handshake_voids_adopted_chunks(new_weights: bool) -> None:
    """Adopted chunks were stored before the reset."""
    manager = NVMeoFOffloadingManager(CoreConfig(weights_never_change=True))
    if new_weights:
        assert manager.weights_may_have_changed(known=True)
    manager.reset_cache()
    manager.attach([hello(0, 4, 8, [(1, 7, 1)])], KEY_BYTES, GROUPS)
    assert manager.core.lookup(key(1)) is None
    (reset,) = manager.take_commands()
    assert isinstance(reset, ResetCommand)
    assert reset.named is not new_weights
