# SPDX-License-Identifier: Apache-2.0
"""Both tiers outlive a pause if, and only if, the weights are bit by bit those from before it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("vllm", reason="wraps vLLM's EngineCore")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)

from tests.unit.manager.bench import GROUPS, KEY_BYTES, TAG, attached, hello, key, keys_of
from vllm_nvmeof_offload.connector import NVMeoFOffloadingConnector
from vllm_nvmeof_offload.manager.core import CoreConfig
from vllm_nvmeof_offload.protocol import ResetCommand
from vllm_nvmeof_offload.vllm_adapter import new_weights
from vllm_nvmeof_offload.vllm_adapter.manager import NVMeoFOffloadingManager
from vllm_nvmeof_offload.vllm_adapter.new_weights import NAME_WEIGHTS, PausedTiers
from vllm_nvmeof_offload.vllm_adapter.weights import weights_fingerprint


class Connector:
    """Our connector's part in a pause, over a real manager with one stored chunk."""

    trusts_weight_version = False

    def __init__(self, config: CoreConfig) -> None:
        self.manager = NVMeoFOffloadingManager(config)
        one = hello(0, 4, 8, (), keyspace="k" * 32)
        self.bench = attached(self.manager, one, KEY_BYTES, GROUPS)
        self.bench.store(1)
        self.bench.write_all()
        self.paused = PausedTiers(self.manager)
        self.has_jobs = False

    def reset_cache(self) -> bool:
        if not self.paused.keep(has_jobs=self.has_jobs):
            self.manager.reset_cache()
        return True

    def look_up(self) -> bool:
        """As before each look-up; returns whether the stored chunk is found."""
        if self.paused.is_due and not self.paused.compare():
            self.manager.reset_cache()
        return self.manager.core.lookup(key(1)) is not None

    def weights_may_have_changed(self, call: str, *, known: bool) -> None:
        if self.manager.weights_may_have_changed(known=known) and not self.paused.undecided:
            self.reset_cache()

    def name_weights(self, version: str) -> str:
        if self.manager.name_weights(version) and not self.paused.undecided:
            self.reset_cache()
        return version

    def resets(self) -> list[ResetCommand]:
        return [one for one in self.manager.take_commands() if isinstance(one, ResetCommand)]


class Engine:
    """An engine whose ranks have weights: one string each."""

    def __init__(self, *, asked: bool = True, **config: object) -> None:
        self.connector = Connector(CoreConfig(**config))  # type: ignore[arg-type]
        self.weights: list[str] | None = ["a", "b"]  # None: the ranks raise
        self.read = 0

        class EngineCore:
            scheduler = SimpleNamespace(connector=self.connector)
            model_executor = SimpleNamespace(is_sleeping=False, collective_rpc=self._answer)

            def collective_rpc(self, method: str, timeout: Any = None, args: Any = ()) -> Any: ...

            def add_lora(self, lora_request: Any) -> None: ...

            def add_request(self, request: Any) -> None: ...

            def _reset_caches(self, reset_running_requests: bool = True) -> None:
                assert self.scheduler.connector.reset_cache()

        new_weights.install(EngineCore)
        self.core: Any = EngineCore()
        self.executor = self.core.model_executor
        if not asked:
            return
        self.core.add_request(SimpleNamespace(lora_request=None))
        assert self.connector.look_up(), "the chunk is of these weights"
        self.read = 0

    def _answer(self, call: Callable[[Any], str]) -> list[str]:
        assert call is weights_fingerprint
        self.read += 1
        if self.weights is None:
            raise RuntimeError("no such device")
        return list(self.weights)

    def pause(self) -> None:
        self.core._reset_caches()

    def load(self, *weights: str) -> None:
        """Load weights by vLLM's API."""
        self.weights = list(weights)
        self.core.collective_rpc("reload_weights")


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_the_same_weights_keep_the_chunk_and_its_tag(engine: Engine) -> None:
    for _ in range(2):
        engine.pause()
        engine.pause()
        assert engine.connector.look_up()
        assert engine.connector.look_up()
    assert engine.read == 2, "once per pause"
    assert engine.connector.resets() == []
    assert engine.connector.manager.core.name == (TAG, False)


@pytest.mark.parametrize("rank", [0, 1])
def test_other_weights_on_one_rank_void_all(engine: Engine, rank: int) -> None:
    engine.pause()
    engine.weights[rank] = "c"  # type: ignore[index]
    assert not engine.connector.look_up()
    (reset,) = engine.connector.resets()
    assert not reset.named, "no later start adopts what they will store"


def test_a_change_before_the_pause_voids_too(engine: Engine) -> None:
    """A program that bypasses the engine relies on the pause to clear the caches."""
    engine.weights = ["a", "c"]
    engine.pause()
    assert not engine.connector.look_up()
    engine.connector.bench.store(1)
    engine.pause()
    assert engine.connector.look_up(), "these weights' own"


def test_a_pause_before_any_request_keeps_what_was_adopted() -> None:
    engine = Engine(asked=False)
    engine.pause()
    assert engine.connector.look_up()
    engine.connector.reset_cache()
    engine.connector.bench.store(1)
    engine.pause()
    engine.weights = ["c", "d"]
    assert not engine.connector.look_up()


def test_a_reset_outside_a_pause_voids_at_once(engine: Engine) -> None:
    engine.connector.reset_cache()
    assert len(engine.connector.resets()) == 1


def test_a_reset_during_the_pause_voids_at_once(engine: Engine) -> None:
    engine.pause()
    engine.connector.reset_cache()
    assert not engine.connector.paused.undecided
    assert not engine.connector.look_up()


def test_weights_that_come_back_after_others_keep_the_chunk(engine: Engine) -> None:
    engine.pause()
    engine.load("c", "d")
    engine.load("a", "b")
    assert engine.connector.look_up()
    assert engine.connector.manager.core.name == (TAG, False), "a later start may adopt it"


def test_an_update_during_the_pause_voids_only_at_the_look_up(engine: Engine) -> None:
    engine.pause()
    engine.load("c", "d")
    assert engine.connector.manager.core.lookup(key(1)) is not None
    assert engine.connector.resets() == []
    assert not engine.connector.look_up()


def test_an_update_after_the_look_up_voids_at_once(engine: Engine) -> None:
    engine.pause()
    assert engine.connector.look_up()
    engine.load("a", "b")
    assert engine.connector.manager.core.lookup(key(1)) is None


@pytest.mark.parametrize("order", ["name first", "update first"])
def test_a_new_name_voids_although_the_weights_are_the_same(engine: Engine, order: str) -> None:
    engine.pause()
    calls = [lambda: engine.load("a", "b"), lambda: name(engine, "step-2")]
    for call in calls if order == "update first" else calls[::-1]:
        call()
    renamed = order == "update first"  # else the update has removed the name
    assert engine.connector.look_up() is not renamed
    assert [reset.named for reset in engine.connector.resets()] == [True] * renamed


def name(engine: Engine, version: str) -> None:
    engine.core.collective_rpc(NAME_WEIGHTS, args=(version,))


def test_the_same_name_keeps_chunk_and_name(engine: Engine) -> None:
    name(engine, "step-1")
    engine.connector.resets()
    engine.connector.bench.store(1)
    named = engine.connector.manager.core.name
    engine.pause()
    engine.load("a", "b")
    name(engine, "step-1")
    assert engine.connector.look_up()
    assert engine.connector.manager.core.name == named


def test_a_name_that_other_weights_keep_is_dropped(engine: Engine) -> None:
    """Two sets of weights would be shared under it."""
    name(engine, "step-1")
    engine.connector.resets()
    engine.connector.bench.store(1)
    engine.pause()
    engine.weights = ["a", "c"]
    name(engine, "step-1")
    assert not engine.connector.look_up()
    assert [reset.named for reset in engine.connector.resets()] == [False]


def test_new_weights_keep_their_new_name(engine: Engine) -> None:
    engine.pause()
    engine.load("c", "d")
    name(engine, "step-2")
    assert not engine.connector.look_up()
    assert [reset.named for reset in engine.connector.resets()] == [True]


def test_weights_that_never_change_are_compared_too() -> None:
    engine = Engine(weights_never_change=True)
    engine.pause()
    assert engine.connector.look_up()
    engine.pause()
    engine.weights = ["c", "d"]
    assert not engine.connector.look_up()
    assert [reset.named for reset in engine.connector.resets()] == [False]


def test_a_store_in_progress_voids(engine: Engine) -> None:
    """Its copy may read GPU memory that sleep unmaps."""
    bench, connector = engine.connector.bench, engine.connector
    plan = bench.core.prepare_store(keys_of(2))
    assert plan.command is not None
    engine.pause()
    assert not connector.paused.undecided
    assert not connector.look_up()


def test_a_job_that_vllm_awaits_voids(engine: Engine) -> None:
    connector = engine.connector
    connector.has_jobs = True
    engine.pause()
    engine.weights = ["c", "d"]
    assert not connector.look_up()
    connector.bench.store(1)
    connector.has_jobs = False
    engine.pause()
    assert connector.look_up(), "its weights were read after the reset"


@pytest.mark.parametrize("weights", [["a", ""], [], None])
@pytest.mark.parametrize("later", [False, True])
def test_unknown_weights_void(engine: Engine, weights: Any, *, later: bool) -> None:
    if not later:
        engine.connector.reset_cache()
        engine.connector.bench.store(1)
        engine.weights = weights
        assert engine.connector.look_up()
    engine.pause()
    engine.weights = weights
    assert engine.connector.paused.undecided is later
    assert not engine.connector.look_up()


def test_a_sleeping_engine_is_not_read(engine: Engine) -> None:
    engine.connector.reset_cache()
    engine.connector.bench.store(1)
    engine.executor.is_sleeping = True
    engine.pause()
    assert engine.read == 0 and not engine.connector.look_up()


def test_an_executor_that_does_not_say_whether_it_sleeps_voids(engine: Engine) -> None:
    del engine.executor.is_sleeping
    engine.pause()
    assert not engine.connector.look_up()
    assert len(engine.connector.resets()) == 1


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_step_that_computes_without_a_look_up_voids(engine: Engine, tokens: int) -> None:
    class Ours(NVMeoFOffloadingConnector):
        connector_scheduler: Any = MagicMock()
        _manager: Any = MagicMock()

        def __init__(self) -> None:
            self._spent_s = 0.0
            self._view = self._old_kv = MagicMock()  # type: ignore[assignment]
            self.paused = engine.connector.paused

    connector = Ours()
    metadata = OffloadingConnectorMetadata({}, {})
    connector.connector_scheduler.build_connector_meta.return_value = metadata
    engine.pause()
    output = SimpleNamespace(total_num_scheduled_tokens=tokens, preempted_req_ids=None)
    connector.build_connector_meta(output)
    assert connector._manager.reset_cache.called is bool(tokens)
    assert connector.paused.undecided is not bool(tokens)


def test_a_vllm_without_the_method_is_accepted() -> None:
    class EngineCore:
        def collective_rpc(self, method: str) -> None: ...

        def add_lora(self, lora_request: Any) -> None: ...

        def add_request(self, request: Any) -> None: ...

    new_weights.install(EngineCore)
    assert not hasattr(EngineCore, "_reset_caches")


# -- the fingerprint -------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Weights of several types and orders in memory, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        tensors = {
            "wide": torch.randn(300, 257),
            "transposed": torch.randn(64, 48).t(),
            "brain": torch.randn(33, 3).to(torch.bfloat16),
            "scale": torch.tensor(0.5),
            "octets": torch.arange(13).to(torch.uint8),
            "part": torch.randn(9)[1:],
        }
        for label, value in tensors.items():
            self.register_parameter(label, torch.nn.Parameter(value, requires_grad=False))
        self.register_buffer("table", torch.randn(10), persistent=False)


def worker(model: torch.nn.Module | None = None, **config: Any) -> Any:
    """A worker of vLLM with this model and configuration."""
    defaults = {"lora_config": None, "speculative_config": None, "offload_config": Offload()}
    runner = SimpleNamespace(get_model=lambda: model or Model())
    return SimpleNamespace(
        vllm_config=SimpleNamespace(**{**defaults, **config}), model_runner=runner
    )


class Offload:
    """vLLM's `OffloadConfig`."""

    def __init__(self, gib: int = 0) -> None:
        self.gib = gib

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Offload) and self.gib == other.gib

    __hash__ = None  # type: ignore[assignment]


def test_equal_weights_have_equal_fingerprints() -> None:
    assert weights_fingerprint(worker()) == weights_fingerprint(worker()) != ""


@pytest.mark.parametrize("tensor", [*dict(Model().named_parameters()), "table"])
def test_every_bit_of_every_tensor_counts(tensor: str) -> None:
    before = weights_fingerprint(worker())
    for octet in (0, -1):
        for bit in (1, 128):
            model = Model()
            changed = getattr(model, tensor)
            flat = changed.data.t() if tensor == "transposed" else changed.data
            flat.view(-1).view(torch.uint8)[octet] ^= bit
            assert weights_fingerprint(worker(model)) != before, (octet, bit)


def test_changes_that_cancel_in_a_plain_sum_count() -> None:
    before = weights_fingerprint(worker())
    model = Model()
    wide = model.wide.data
    wide[[0, 1]] = wide[[1, 0]]
    assert weights_fingerprint(worker(model)) != before
    model = Model()
    lanes = model.wide.data.view(-1)[: 300 * 257 // 2 * 2].view(torch.int64)
    lanes[5] += 1 << 62
    lanes[900] += 1 << 62
    assert weights_fingerprint(worker(model)) != before


def test_a_type_or_a_shape_counts() -> None:
    before = weights_fingerprint(worker())
    model = Model()
    model.octets.data = model.octets.data.view(torch.int8)
    assert weights_fingerprint(worker(model)) != before
    model = Model()
    model.wide.data = model.wide.data.view(257, 300)
    assert weights_fingerprint(worker(model)) != before


def test_a_drafters_weights_count() -> None:
    draft = Model()
    speculative = SimpleNamespace(draft_model_config="draft", target_model_config="target")
    one = worker(speculative_config=speculative)
    one.get_draft_model = lambda: draft
    before = weights_fingerprint(one)
    draft.scale.data += 1
    assert weights_fingerprint(one) != before
    one.get_draft_model = lambda: None
    assert weights_fingerprint(one) == ""


@pytest.mark.parametrize(
    "config", [{"lora_config": object()}, {"offload_config": Offload(4)}], ids=["lora", "offload"]
)
def test_weights_outside_parameters_are_unknown(config: dict[str, Any]) -> None:
    assert weights_fingerprint(worker(**config)) == ""


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_weights_that_a_program_put_to_sleep_are_not_read(
    monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    parts = {0: SimpleNamespace(tag=tag, is_asleep=True)}
    allocator = SimpleNamespace(instance=SimpleNamespace(pointer_to_data=parts))
    module = SimpleNamespace(CuMemAllocator=allocator)
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", module)
    assert (weights_fingerprint(worker()) == "") is (tag == "weights")
    parts[0].is_asleep = False
    assert weights_fingerprint(worker())


def test_a_parameter_whose_bytes_are_elsewhere_is_unknown() -> None:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None): ...

    model = Model()
    wrapped = torch.Tensor._make_wrapper_subclass(Wrapper, (4,))
    model.register_buffer("wrapped", wrapped)
    assert weights_fingerprint(worker(model)) == ""
    model = Model()
    shared = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    shared.partitions = {0: torch.ones(3)}  # type: ignore[attr-defined]
    model.register_parameter("shared", shared)
    assert weights_fingerprint(worker(model)) == ""
