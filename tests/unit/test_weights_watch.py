# SPDX-License-Identifier: Apache-2.0
"""Every call of vLLM's engine that can change weights is told to our connector, no other one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_nvmeof_offload.errors import IntegrationError
from vllm_nvmeof_offload.integration import weights_watch


class Connector:
    """Ours, as far as it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, bool]] = []

    def weights_may_have_changed(self, call: str, *, known: bool) -> None:
        self.told.append((call, known))


def engine(connector: Any) -> Any:
    """An engine whose workers answer with what they were asked."""

    class EngineCore:
        def __init__(self) -> None:
            self.scheduler = SimpleNamespace(connector=connector)

        def collective_rpc(self, method: Any, timeout: float | None = None, args: Any = ()) -> Any:
            if args == ("fail",):
                raise RuntimeError("half way")
            return [method, timeout, args]

        def add_lora(self, lora_request: Any) -> bool:
            return bool(lora_request)

    weights_watch.install(EngineCore)
    weights_watch.install(EngineCore)  # wrapped once, so told once
    return EngineCore()


@pytest.mark.parametrize("method", sorted(weights_watch.KNOWN_TO_CHANGE))
def test_what_changes_weights_is_told_as_known(method: str) -> None:
    connector = Connector()
    assert engine(connector).collective_rpc(method, 2.0, ("x",)) == [method, 2.0, ("x",)]
    assert connector.told == [(method, True)]


@pytest.mark.parametrize("method", sorted(weights_watch.HARMLESS))
def test_what_changes_none_is_not_told(method: str) -> None:
    connector = Connector()
    assert engine(connector).collective_rpc(method) == [method, None, ()]
    assert connector.told == []


def test_a_call_of_the_users_own_may_change_them() -> None:
    def reload_weights(worker: Any) -> None:  # a function that is named like a method
        pytest.fail("the engine of this test calls nothing")

    connector = Connector()
    core = engine(connector)
    core.collective_rpc("apply_model")
    core.collective_rpc(reload_weights)
    assert connector.told == [("apply_model", False), ("reload_weights", False)]


def test_a_call_that_fails_is_told_as_well() -> None:
    connector = Connector()
    with pytest.raises(RuntimeError, match="half way"):
        engine(connector).collective_rpc("update_weights", args=("fail",))
    assert connector.told == [("update_weights", True)]


def test_an_adapter_in_the_place_of_another_is_told() -> None:
    connector = Connector()
    core = engine(connector)
    core.add_lora(SimpleNamespace(load_inplace=False))
    assert connector.told == []
    core.add_lora(SimpleNamespace(load_inplace=True))
    assert connector.told == [("add_lora with load_inplace", True)]


def test_our_connector_is_found_among_several() -> None:
    connector = Connector()
    core = engine(SimpleNamespace(sub_connectors=[SimpleNamespace(), connector]))
    core.collective_rpc("reload_weights")
    assert connector.told == [("reload_weights", True)]


@pytest.mark.parametrize("connector", [None, SimpleNamespace()])
def test_other_engines_are_left_alone(connector: Any) -> None:
    assert engine(connector).collective_rpc("reload_weights") == ["reload_weights", None, ()]


def test_an_engine_before_its_scheduler_is_made() -> None:
    core = engine(None)
    del core.scheduler
    assert core.collective_rpc("load_model") == ["load_model", None, ()]


def test_an_engine_that_is_not_as_expected_is_refused() -> None:
    with pytest.raises(IntegrationError, match="EngineCore has no collective_rpc"):
        weights_watch.install(type("EngineCore", (), {}))
