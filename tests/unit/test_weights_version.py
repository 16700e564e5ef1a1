# SPDX-License-Identifier: Apache-2.0
"""Naming the weights of a running server, and the order in which the name is reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.vllm_adapter import new_weights
from vllm_nvmeof_offload.vllm_adapter.new_weights import NAME_WEIGHTS, WHOLE, check_version

CHANGED, NAMED = "changed", "named"


class Connector:
    """Our connector. events: what was reported to it, and what the workers did, in order."""

    def __init__(self, *, trusts: bool = False) -> None:
        self.trusts_weight_version = trusts
        self.events: list[tuple[str, str]] = []

    def weights_may_have_changed(self, call: str, *, known: bool) -> None:
        self.events.append((CHANGED, call))

    def name_weights(self, version: str) -> str:
        self.events.append((NAMED, version))
        return f"it is {version}"


def engine(connector: Any, *, has_versions: bool = True) -> Any:
    """An engine whose workers know some methods, and note their arguments."""

    class EngineCore:
        def __init__(self) -> None:
            self.scheduler = SimpleNamespace(connector=connector)
            self.asked: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

        def collective_rpc(
            self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None
        ) -> list[str]:
            if method == NAME_WEIGHTS:
                raise NotImplementedError(method)
            self.asked.append((method, tuple(args), dict(kwargs or {})))
            if args == ("fail",):
                raise RuntimeError("half way")
            return ["done"]

        def add_lora(self, lora_request: Any) -> None: ...

        def add_request(self, request: Any) -> None: ...

    if has_versions:

        def set_weight_version(self: Any, weight_version: str) -> None:
            self.version = weight_version

        EngineCore.set_weight_version = set_weight_version  # type: ignore[attr-defined]
    new_weights.install(EngineCore)
    return EngineCore()


def test_our_call_names_the_weights_without_the_workers() -> None:
    connector = Connector()
    core = engine(connector)
    assert core.collective_rpc(NAME_WEIGHTS, None, ["step-1"]) == ["it is step-1"]
    assert core.collective_rpc(NAME_WEIGHTS, kwargs={"version": "a/b:2"}) == ["it is a/b:2"]
    assert connector.events == [(NAMED, "step-1"), (NAMED, "a/b:2")]
    assert core.asked == []


def test_an_engine_without_our_connector_does_not_know_our_call() -> None:
    for connector in (None, SimpleNamespace()):
        with pytest.raises(NotImplementedError):
            engine(connector).collective_rpc(NAME_WEIGHTS, args=("step-1",))


@pytest.mark.parametrize("method", sorted(WHOLE))
def test_the_last_call_of_an_update_names_what_it_has_loaded(method: str) -> None:
    connector = Connector()
    core = engine(connector)
    given = {"weights_path": "/there", "weights_version": "step-2"}
    assert core.collective_rpc(method, kwargs=given) == ["done"]
    assert core.asked == [(method, (), {"weights_path": "/there"})]
    assert connector.events == [(CHANGED, method), (NAMED, "step-2")]
    assert given["weights_version"] == "step-2", "the caller's"


def test_what_has_failed_is_not_named() -> None:
    connector = Connector()
    core = engine(connector)
    with pytest.raises(RuntimeError, match="half way"):
        core.collective_rpc("reload_weights", None, ("fail",), {"weights_version": "step-2"})
    assert connector.events == [(CHANGED, "reload_weights")]


@pytest.mark.parametrize("method", sorted(new_weights.KNOWN_TO_CHANGE - WHOLE))
def test_a_piece_of_an_update_is_not_named(method: str) -> None:
    """Weights are those of the name only when the last piece has come."""
    connector = Connector()
    core = engine(connector)
    with pytest.raises(ConfigError, match=f"'step-2': {method} is not the last .* afterwards"):
        core.collective_rpc(method, kwargs={"weights_version": "step-2"})
    assert (connector.events, core.asked) == ([], []), "nothing was begun"


def test_an_argument_of_a_users_own_function_is_its_own() -> None:
    connector = Connector()
    core = engine(connector)
    core.collective_rpc("my_update", kwargs={"weights_version": 5})
    assert core.asked == [("my_update", (), {"weights_version": 5})]
    assert connector.events == [(CHANGED, "my_update")]


@pytest.mark.parametrize("trusts", [True, False])
def test_vllms_own_name_counts_only_where_it_is_trusted(trusts: bool) -> None:
    connector = Connector(trusts=trusts)
    core = engine(connector)
    core.collective_rpc("finish_weight_update")
    core.set_weight_version("step-3")
    assert core.version == "step-3"
    assert connector.events == [
        (CHANGED, "finish_weight_update"),
        *([(NAMED, "step-3")] if trusts else []),
    ]


def test_a_name_of_vllm_that_is_none_of_ours_is_refused_where_it_is_trusted() -> None:
    core = engine(Connector(trusts=True))
    with pytest.raises(ConfigError, match="weight_version='step 3'"):
        core.set_weight_version("step 3")
    assert not hasattr(core, "version")
    engine(Connector()).set_weight_version("step 3")


def test_a_vllm_without_versions_is_accepted() -> None:
    connector = Connector(trusts=True)
    engine(connector, has_versions=False).collective_rpc("reload_weights")
    assert connector.events == [(CHANGED, "reload_weights")]


GOOD = ["1", "step-1200", "run/7:step.3@sha+x=y_z", "a" * 128]
BAD = [
    ("", "must begin with a letter or digit"),
    ("-1", "must begin with a letter or digit"),
    ("step 2", "letters, digits"),
    ("step-2\n", "letters, digits"),
    ("step\x002", "letters, digits"),
    ("Schritt-zwölf", "letters, digits"),
    ("a" * 129, "has 129 characters; use at most 128"),
    (1200, "must be a string"),
    (None, "must be a string"),
    (b"step-2", "must be a string"),
]


@pytest.mark.parametrize("version", GOOD)
def test_a_name_is_taken_as_it_is(version: str) -> None:
    assert check_version("name", version) == version


@pytest.mark.parametrize(("version", "remedy"), BAD)
def test_a_bad_name_is_refused_with_its_value_and_the_remedy(version: Any, remedy: str) -> None:
    connector = Connector()
    core = engine(connector)
    calls: list[dict[str, Any]] = [
        {"method": NAME_WEIGHTS, "args": (version,)},
        {"method": "reload_weights", "kwargs": {"weights_version": version}},
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=remedy) as refused:
            core.collective_rpc(**call)
        assert repr(version) in str(refused.value)
    assert (connector.events, core.asked) == ([], [])


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), (("a", "b"), {}), (("a",), {"version": "b"}), ((), {"name": "a"})],
)
def test_our_call_has_one_argument(args: tuple[str, ...], kwargs: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="give one argument"):
        engine(Connector()).collective_rpc(NAME_WEIGHTS, None, args, kwargs)
