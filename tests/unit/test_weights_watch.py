# SPDX-License-Identifier: Apache-2.0
"""Only calls of vLLM's engine that can change weights are reported to our connector."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_nvmeof_offload.errors import IntegrationError
from vllm_nvmeof_offload.vllm_adapter import new_weights
from vllm_nvmeof_offload.vllm_adapter.weights import Adapters


class Connector:
    """Our connector, as far as calls are reported to it."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, bool]] = []

    def weights_may_have_changed(self, call: str, *, known: bool) -> None:
        self.reported.append((call, known))


def engine(connector: Any, loads: Callable[[], object] = bool) -> Any:
    """An engine whose workers answer with what they were asked."""

    class EngineCore:
        def __init__(self) -> None:
            self.scheduler = SimpleNamespace(connector=connector)

        def collective_rpc(self, method: Any, timeout: float | None = None, args: Any = ()) -> Any:
            if args == ("fail",):
                raise RuntimeError("half way")
            return [method, timeout, args]

        def add_lora(self, lora_request: Any) -> bool:
            loads()
            return bool(lora_request)

        def add_request(self, request: Any, request_wave: int = 0) -> None:
            pass

    new_weights.install(EngineCore)
    new_weights.install(EngineCore)  # wrapped once, so reported once
    return EngineCore()


@pytest.mark.parametrize("method", sorted(new_weights.KNOWN_TO_CHANGE))
def test_calls_that_change_weights_are_reported_as_known(method: str) -> None:
    connector = Connector()
    assert engine(connector).collective_rpc(method, 2.0, ("x",)) == [method, 2.0, ("x",)]
    assert connector.reported == [(method, True)]


@pytest.mark.parametrize("method", sorted(new_weights.HARMLESS))
def test_calls_that_change_no_weights_are_not_reported(method: str) -> None:
    connector = Connector()
    assert engine(connector).collective_rpc(method) == [method, None, ()]
    assert connector.reported == []


def test_a_users_own_call_may_change_weights() -> None:
    def reload_weights(worker: Any) -> None:  # a function that is named like a method
        pytest.fail("the engine of this test calls nothing")

    connector = Connector()
    core = engine(connector)
    core.collective_rpc("apply_model")
    core.collective_rpc(reload_weights)
    assert connector.reported == [("apply_model", False), ("reload_weights", False)]


def test_a_failed_call_is_reported_too() -> None:
    connector = Connector()
    with pytest.raises(RuntimeError, match="half way"):
        engine(connector).collective_rpc("update_weights", args=("fail",))
    assert connector.reported == [("update_weights", True)]


def make_adapter(directory: Path, weights: bytes) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "tuned", b"old")


def lora(number: int, path: Path, *, name: str = "tuned", load_inplace: bool = False) -> Any:
    return SimpleNamespace(
        lora_name=name, lora_int_id=number, lora_path=str(path), load_inplace=load_inplace
    )


def test_an_adapter_that_replaces_another_is_reported(adapter: Path) -> None:
    connector = Connector()
    core = engine(connector)
    core.add_lora(lora(1, adapter))
    assert connector.reported == []
    core.add_lora(lora(1, adapter, load_inplace=True))
    assert connector.reported == [("add_lora with load_inplace", True)]


def test_an_adapter_loaded_again_with_other_files_is_reported(adapter: Path) -> None:
    """Unloaded, overwritten and loaded again: another number, and the same block hashes."""
    connector = Connector()
    core = engine(connector)
    for number in (1, 2):
        core.add_lora(lora(number, adapter))
        core.collective_rpc("remove_lora", args=(number,))
    core.add_lora(lora(3, adapter, name="another"))
    assert connector.reported == []
    (adapter / "adapter_model.safetensors").write_bytes(b"new")
    core.add_lora(lora(4, adapter))
    assert connector.reported == [("add_lora with different files", True)]
    core.add_lora(lora(5, adapter))
    assert len(connector.reported) == 1


def test_an_adapter_that_only_requests_name_is_reported(adapter: Path) -> None:
    """Offline `add_lora` is not called: the workers load the adapter that a request names."""
    connector = Connector()
    core = engine(connector)
    for number in (1, 1, 2):
        core.add_request(SimpleNamespace(lora_request=lora(number, adapter)), 7)
    core.add_request(SimpleNamespace(lora_request=None))
    assert connector.reported == []
    adapter.rename(adapter.with_name("old"))
    make_adapter(adapter, b"new")
    core.add_request(SimpleNamespace(lora_request=lora(2, adapter)))
    assert connector.reported == [], "the workers have that one already"
    core.add_request(SimpleNamespace(lora_request=lora(3, adapter)))
    reported = ("a request for an adapter with different files", True)
    assert connector.reported == [reported]


def test_files_that_change_while_they_are_read_are_not_known(adapter: Path) -> None:
    connector = Connector()
    core = engine(connector, loads=lambda: make_adapter(adapter, b"meanwhile"))
    core.add_lora(lora(1, adapter))
    core.add_lora(lora(2, adapter))
    assert connector.reported == [("add_lora with different files", True)]


def test_an_adapter_of_a_hub_may_have_moved() -> None:
    connector = Connector()
    core = engine(connector)
    core.add_lora(lora(1, Path("org/adapter")))
    assert connector.reported == []
    core.add_lora(lora(2, Path("org/adapter")))
    assert connector.reported == [("add_lora with different files", True)]


def test_adapters_that_were_forgotten_count_as_new() -> None:
    adapters = Adapters(adapters_max=2)
    changed = [adapters.note(lora(n, Path(f"/{n}")), "same") for n in (1, 2, 1, 3, 1, 3)]
    assert changed == [False, False, False, True, False, False]


def test_our_connector_is_found_among_several() -> None:
    connector = Connector()
    core = engine(SimpleNamespace(sub_connectors=[SimpleNamespace(), connector]))
    core.collective_rpc("reload_weights")
    assert connector.reported == [("reload_weights", True)]


@pytest.mark.parametrize("connector", [None, SimpleNamespace()])
def test_other_engines_are_not_wrapped(connector: Any) -> None:
    assert engine(connector).collective_rpc("reload_weights") == ["reload_weights", None, ()]


def test_an_engine_without_a_scheduler_yet_is_accepted() -> None:
    core = engine(None)
    del core.scheduler
    assert core.collective_rpc("load_model") == ["load_model", None, ()]


def test_an_unexpected_engine_is_refused() -> None:
    with pytest.raises(IntegrationError, match="EngineCore has no collective_rpc"):
        new_weights.install(type("EngineCore", (), {}))
