# SPDX-License-Identifier: Apache-2.0
"""The identity of the weights: digests, names, and how replaced weights are noticed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.process import wait_until
from tests.unit.adapter.test_deployment import _config
from vllm_nvmeof_offload.config import WEIGHTS_SEEN
from vllm_nvmeof_offload.errors import ConfigError, IntegrationError
from vllm_nvmeof_offload.vllm_adapter import new_weights
from vllm_nvmeof_offload.vllm_adapter.deployment import Deployment, describe, note_weights
from vllm_nvmeof_offload.vllm_adapter.new_weights import NAME_WEIGHTS, WHOLE, check_version
from vllm_nvmeof_offload.vllm_adapter.weights import Adapters, weights_digest

SMALL_BYTES = 64 << 10


def make_model(path: Path, big: bool = False) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"layers": 2}')
    (path / "model-00001.safetensors").write_bytes(os.urandom(3 << 20) if big else b"w" * 9000)
    (path / "README.md").write_text("not part of the model")
    return path


def test_weights_are_distinguished_by_content(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    digest = weights_digest(model)
    (model / "README.md").write_text("other words")
    assert weights_digest(model) == digest
    for changed in ("config.json", "model-00001.safetensors"):
        content = (model / changed).read_bytes()
        (model / changed).write_bytes(content[:-1] + b"?")
        assert weights_digest(model) != digest
        (model / changed).write_bytes(content)
    (model / "adapter.safetensors").write_bytes(b"adapter")
    assert weights_digest(model) != digest


def test_other_files_that_vllm_reads_count(tmp_path: Path) -> None:
    """The index says which shards are loaded; some models keep an encoder one level down."""
    model = make_model(tmp_path / "model")
    digests = {weights_digest(model)}
    (model / "model.safetensors.index.json").write_text("{}")
    digests.add(weights_digest(model))
    (model / "encoder").mkdir()
    (model / "encoder" / "model-00001.safetensors").write_bytes(b"encoder")
    digests.add(weights_digest(model))
    (model / "encoder" / "model-00001.safetensors").write_bytes(b"Encoder")
    digests.add(weights_digest(model))
    assert len(digests) == 4
    (model / ".cache").mkdir()
    (model / ".cache" / "model.safetensors").write_bytes(b"another")
    assert weights_digest(model) in digests


def test_large_files_are_sampled_at_both_ends_and_between(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", big=True)
    shard = model / "model-00001.safetensors"
    size = shard.stat().st_size
    digest = weights_digest(model)
    assert weights_digest(model) == digest
    for start, length in [(0, 1), (size - 1, 1), (size // 2, 200_000)]:
        flip(shard, start, length)
        assert weights_digest(model) != digest
        flip(shard, start, length)
    assert weights_digest(model) == digest


def test_a_terabyte_of_weights_is_digested_quickly(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    with (model / "model-00002.safetensors").open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading all of it would take minutes
    assert weights_digest(model) == weights_digest(model)


def test_without_local_files_there_is_no_digest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision"):
        weights_digest(Path("org/model"))
    with pytest.raises(ConfigError, match="revision"):
        weights_digest(tmp_path)


def safetensors(path: Path, sizes: dict[str, int], *, seed: int = 0) -> dict[str, int]:
    """Write a file of tensors of these sizes in bytes; return where each begins."""
    header, begin = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    data = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(data + begin)
    return {name: data + entry["data_offsets"][0] for name, entry in header.items()}


def flip(path: Path, offset: int, length: int = 1) -> None:
    """Change bytes of a file; flipping again restores them."""
    with path.open("r+b") as file:
        file.seek(offset)
        changed = bytes(byte ^ 1 for byte in file.read(length))
        file.seek(offset)
        file.write(changed)


def test_every_byte_of_a_small_tensor_counts(tmp_path: Path) -> None:
    """Scales of four bytes between matrices of 8 MiB, as in an FP8 checkpoint."""
    shard = tmp_path / "model.safetensors"
    sizes = {
        f"{layer}.{name}": size
        for layer in range(64)
        for name, size in (("weight", 8 << 20), ("k_scale", 4), ("norm", SMALL_BYTES))
    }
    begins = safetensors(shard, sizes)
    digest = weights_digest(tmp_path)
    for name in ("0.k_scale", "31.norm", "63.k_scale"):
        for byte in (0, sizes[name] - 1):
            flip(shard, begins[name] + byte)
            assert weights_digest(tmp_path) != digest, name
            flip(shard, begins[name] + byte)
    assert weights_digest(tmp_path) == digest


def test_every_large_tensor_has_a_sample(tmp_path: Path) -> None:
    shard = tmp_path / "model.safetensors"
    sizes = {str(n): 1 << 20 for n in range(300)}
    begins = safetensors(shard, sizes)
    digest = weights_digest(tmp_path)
    for name in ("0", "150", "299"):
        flip(shard, begins[name], sizes[name])
        assert weights_digest(tmp_path) != digest, name
        flip(shard, begins[name], sizes[name])
    assert weights_digest(tmp_path) == digest


def bytes_read(model: Path) -> int:
    """How many bytes a digest reads, as the kernel counts them."""

    def total() -> int:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["rchar"])

    before = total()
    weights_digest(model)
    return total() - before


def _entry(*offsets: Any) -> dict[str, Any]:
    return {"data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[1]",
        b'{"a": ' + b"9" * 5000 + b"}",
        *(
            json.dumps(entries).encode()
            for entries in (
                {"a": 1},
                {"a": {}},
                {"a": _entry(0)},
                {"a": _entry(0, "9")},
                {"a": _entry(False, True)},
                {"a": _entry(0, 1.5)},
                {"a": _entry(-5, 9)},
                {"a": _entry(9, 5)},
                {"a": _entry(0, 1 << 60)},
                {"a": _entry(0, 900), "b": _entry(0, 900)},
            )
        ),
    ],
    ids=repr,
)
def test_an_invalid_header_leaves_the_samples(tmp_path: Path, header: bytes) -> None:
    shard = tmp_path / "model.safetensors"
    lengths = (len(header), len(header) + 1, 0, 1 << 40, (1 << 64) - 1)
    for length in lengths:
        shard.write_bytes(length.to_bytes(8, "little") + header + bytes(1000))
        digest = weights_digest(tmp_path)
        flip(shard, shard.stat().st_size - 1)
        assert weights_digest(tmp_path) != digest
    for size in range(9):  # cut short
        shard.write_bytes(b"\x08" + bytes(7)[:size])
        weights_digest(tmp_path)


def test_overlapping_tensors_are_not_read_twice(tmp_path: Path) -> None:
    """Ten thousand names for the same 64 KiB would be 640 MB."""
    shard = tmp_path / "model.safetensors"
    text = json.dumps({str(n): _entry(0, SMALL_BYTES) for n in range(10_000)}).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + bytes(2 * SMALL_BYTES))
    assert bytes_read(tmp_path) < 4 << 20


def test_the_bytes_read_of_a_large_shard_are_bounded(tmp_path: Path) -> None:
    """Five gigabytes (sparse): header, scales and samples are some MB."""
    sizes = {}
    for expert in range(300):
        sizes |= {f"{expert}.weight": 16 << 20, f"{expert}.scale": 3584}
    safetensors(tmp_path / "model.safetensors", sizes)
    assert (tmp_path / "model.safetensors").stat().st_size > 5_000_000_000
    assert 1 << 20 < bytes_read(tmp_path) < 4 << 20


# Weights replaced while a server starts: the loaded weights differ from the files on disk.


def _version(directory: Path, byte: int) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes([byte]) * 4096)
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that is reached by a link: `current/model`, beside a newer version of it."""
    _version(tmp_path / "v1" / "model", 1)
    _version(tmp_path / "v2" / "model", 2)
    (tmp_path / "current").symlink_to(tmp_path / "v1")
    return tmp_path / "current" / "model"


def flip_the_link(model: Path) -> None:
    top = model.parent.parent
    (top / "fresh").symlink_to(top / "v2")
    (top / "fresh").rename(top / "current")


def rename_the_directory(model: Path) -> None:
    model.rename(model.with_name("old"))
    (model.parent.parent / "v2" / "model").rename(model)


def rename_one_above(model: Path) -> None:
    top = model.parent.parent
    (top / "v1").rename(top / "old")
    (top / "v2").rename(top / "v1")


def write_in_place(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"new" * 9)


def copy_with_its_times(model: Path) -> None:
    """As `cp -p` and `rsync -a` do: size and time of modification as before."""
    file = model / "model.safetensors"
    was = file.stat()
    fresh = model / "fresh"
    fresh.write_bytes(b"n" * was.st_size)
    os.utime(fresh, ns=(was.st_atime_ns, was.st_mtime_ns))
    fresh.rename(file)


def add_a_shard(model: Path) -> None:
    (model / "model-2.safetensors").write_bytes(b"more")


def remove_all(model: Path) -> None:
    model.rename(model.with_name("gone"))


DEPLOYMENTS: list[Callable[[Path], None]] = [
    flip_the_link,
    rename_the_directory,
    rename_one_above,
    write_in_place,
    copy_with_its_times,
    add_a_shard,
    remove_all,
]


def _noted(config: Any, noted: dict[str, str] | None = None) -> dict[str, str]:
    extra: dict[str, Any] = {WEIGHTS_SEEN: noted or {}}
    note_weights(config, extra)
    stamps: dict[str, str] = extra[WEIGHTS_SEEN]
    return stamps


def _rank(config: Any, stamps: dict[str, str]) -> Deployment:
    return describe(config, "0.32.0", stamps=stamps)


@pytest.mark.parametrize("deploy", DEPLOYMENTS)
def test_files_replaced_after_their_stamp_are_not_trusted(
    model: Path, deploy: Callable[[Path], None]
) -> None:
    config = _config(str(model))
    stamps = _noted(config)
    assert _rank(config, stamps).replaced() == ()
    deploy(model)
    (why,) = _rank(config, stamps).replaced()
    assert why == f"files of {model} were replaced while the server started"
    if model.exists():  # the next start is of what is there now
        assert _rank(config, _noted(config)).replaced() == ()


def test_a_model_keeps_its_first_stamp(model: Path) -> None:
    """vLLM completes copies of the configuration while it loads the model."""
    config = _config(str(model))
    stamps = _noted(config)
    flip_the_link(model)
    assert _noted(config, stamps) == stamps
    assert _noted(_config("org/name"), {}) == {}


def test_code_and_drafters_are_stamped_too(model: Path, tmp_path: Path) -> None:
    config = _config(str(model))
    draft = _config(str(_version(tmp_path / "drafter", 3))).model_config
    config.speculative_config = type(
        "Speculative",
        (),
        {
            "method": "draft_model",
            "draft_model_config": draft,
            "target_model_config": config.model_config,
            "draft_load_config": None,
        },
    )
    config.model_config.trust_remote_code = True
    stamps = _noted(config)
    assert set(stamps) == {str(model), str(tmp_path / "drafter")}
    (model / "modeling.py").write_text("")
    write_in_place(tmp_path / "drafter")
    assert len(_rank(config, stamps).replaced()) == 2
    config.model_config.trust_remote_code = False
    assert len(_rank(config, stamps).replaced()) == 1


# -- without our plugin no stamp exists: the time of change decides ------------------------


def _began_now(tmp_path: Path) -> float:
    """A time after every change so far, as the file system's coarse clock counts."""
    probe = tmp_path / "probe"
    probe.touch()
    began_s = probe.stat().st_ctime

    def has_ticked() -> bool:
        os.utime(probe)
        return probe.stat().st_ctime > began_s

    wait_until("a tick of the file system's clock", has_ticked)
    return probe.stat().st_ctime


@pytest.mark.parametrize("deploy", DEPLOYMENTS[:2] + DEPLOYMENTS[3:6])
def test_unstamped_newer_files_are_not_trusted(
    model: Path, tmp_path: Path, deploy: Callable[[Path], None]
) -> None:
    config = _config(str(model))
    began_s = _began_now(tmp_path)
    assert describe(config, "0.32.0", began_s=began_s).replaced() == ()
    deploy(model)
    (why,) = describe(config, "0.32.0", began_s=began_s).replaced()
    assert why.endswith("was written while this process started")


def test_a_hub_model_has_no_files_to_be_newer() -> None:
    config = _config("org/name", "aaaa")
    assert describe(config, "0.32.0", began_s=0.0).replaced() == ()


# Naming the weights of a running server, and the order in which the name is reported.


NAMED = "named"


class Connector:
    """Our connector. events: calls that may have changed weights, whether that is known, and names
    of weights, in order."""

    def __init__(self, *, trusts: bool = False) -> None:
        self.trusts_weight_version = trusts
        self.events: list[tuple[str, object]] = []

    def weights_may_have_changed(self, call: str, *, known: bool) -> None:
        self.events.append((call, known))

    def name_weights(self, version: str) -> str:
        self.events.append((NAMED, version))
        return f"it is {version}"


def engine(connector: Any, *, has_versions: bool = True, loads: Callable[[], object] = bool) -> Any:
    """An engine whose workers note what they were asked, and load an adapter by `loads`."""

    class EngineCore:
        def __init__(self) -> None:
            self.scheduler = SimpleNamespace(connector=connector)
            self.asked: list[tuple[Any, ...]] = []

        def collective_rpc(
            self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
        ) -> list[str]:
            if method == NAME_WEIGHTS:
                raise NotImplementedError(method)
            self.asked.append((method, timeout, tuple(args), dict(kwargs or {})))
            if args == ("fail",):
                raise RuntimeError("half way")
            return ["done"]

        def add_lora(self, lora_request: Any) -> None:
            loads()

        def add_request(self, request: Any, request_wave: int = 0) -> None: ...

    if has_versions:

        def set_weight_version(self: Any, weight_version: str) -> None:
            self.version = weight_version

        EngineCore.set_weight_version = set_weight_version  # type: ignore[attr-defined]
    new_weights.install(EngineCore)
    new_weights.install(EngineCore)  # wrapped once, so reported once
    return EngineCore()


def test_our_call_names_the_weights_without_the_workers() -> None:
    connector = Connector()
    core = engine(connector)
    assert core.collective_rpc(NAME_WEIGHTS, None, ["step-1"]) == ["it is step-1"]
    assert core.collective_rpc(NAME_WEIGHTS, kwargs={"version": "a/b:2"}) == ["it is a/b:2"]
    assert connector.events == [(NAMED, "step-1"), (NAMED, "a/b:2")]
    assert core.asked == []


@pytest.mark.parametrize("connector", [None, SimpleNamespace()])
def test_an_engine_without_our_connector_works_as_without_us(connector: Any) -> None:
    core = engine(connector)
    assert core.collective_rpc("reload_weights") == ["done"]
    with pytest.raises(NotImplementedError):
        core.collective_rpc(NAME_WEIGHTS, args=("step-1",))


@pytest.mark.parametrize("method", sorted(WHOLE))
def test_the_last_call_of_an_update_names_what_it_has_loaded(method: str) -> None:
    connector = Connector()
    core = engine(connector)
    given = {"weights_path": "/there", "weights_version": "step-2"}
    assert core.collective_rpc(method, kwargs=given) == ["done"]
    assert core.asked == [(method, None, (), {"weights_path": "/there"})]
    assert connector.events == [(method, True), (NAMED, "step-2")]
    assert given["weights_version"] == "step-2", "the caller's"


def test_a_call_that_has_failed_is_reported_and_not_named() -> None:
    connector = Connector()
    core = engine(connector)
    with pytest.raises(RuntimeError, match="half way"):
        core.collective_rpc("reload_weights", None, ("fail",), {"weights_version": "step-2"})
    assert connector.events == [("reload_weights", True)]


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
    assert core.asked == [("my_update", None, (), {"weights_version": 5})]
    assert connector.events == [("my_update", False)]


@pytest.mark.parametrize("trusts", [True, False])
def test_vllms_own_name_counts_only_where_it_is_trusted(trusts: bool) -> None:
    connector = Connector(trusts=trusts)
    core = engine(connector)
    core.collective_rpc("finish_weight_update")
    core.set_weight_version("step-3")
    assert core.version == "step-3"
    assert connector.events == [
        ("finish_weight_update", True),
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
    assert connector.events == [("reload_weights", True)]


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


# Only calls of vLLM's engine that can change weights are reported to our connector.


@pytest.mark.parametrize("method", sorted(new_weights.KNOWN_TO_CHANGE))
def test_calls_that_change_weights_are_reported_as_known(method: str) -> None:
    connector = Connector()
    core = engine(connector)
    assert core.collective_rpc(method, 2.0, ("x",)) == ["done"]
    assert core.asked == [(method, 2.0, ("x",), {})]
    assert connector.events == [(method, True)]


@pytest.mark.parametrize("method", sorted(new_weights.HARMLESS))
def test_calls_that_change_no_weights_are_not_reported(method: str) -> None:
    connector = Connector()
    assert engine(connector).collective_rpc(method) == ["done"]
    assert connector.events == []


def test_a_users_own_call_may_change_weights() -> None:
    def reload_weights(worker: Any) -> None:  # a function that is named like a method
        pytest.fail("the engine of this test calls nothing")

    connector = Connector()
    core = engine(connector)
    core.collective_rpc("apply_model")
    core.collective_rpc(reload_weights)
    assert connector.events == [("apply_model", False), ("reload_weights", False)]


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
    assert connector.events == []
    core.add_lora(lora(1, adapter, load_inplace=True))
    assert connector.events == [("add_lora with load_inplace", True)]


def test_an_adapter_loaded_again_with_other_files_is_reported(adapter: Path) -> None:
    """Unloaded, overwritten and loaded again: another number, and the same block hashes."""
    connector = Connector()
    core = engine(connector)
    for number in (1, 2):
        core.add_lora(lora(number, adapter))
        core.collective_rpc("remove_lora", args=(number,))
    core.add_lora(lora(3, adapter, name="another"))
    assert connector.events == []
    (adapter / "adapter_model.safetensors").write_bytes(b"new")
    core.add_lora(lora(4, adapter))
    assert connector.events == [("add_lora with different files", True)]
    core.add_lora(lora(5, adapter))
    assert len(connector.events) == 1


def test_an_adapter_that_only_requests_name_is_reported(adapter: Path) -> None:
    """Offline `add_lora` is not called: the workers load the adapter that a request names."""
    connector = Connector()
    core = engine(connector)
    for number in (1, 1, 2):
        core.add_request(SimpleNamespace(lora_request=lora(number, adapter)), 7)
    core.add_request(SimpleNamespace(lora_request=None))
    assert connector.events == []
    adapter.rename(adapter.with_name("old"))
    make_adapter(adapter, b"new")
    core.add_request(SimpleNamespace(lora_request=lora(2, adapter)))
    assert connector.events == [], "the workers have that one already"
    core.add_request(SimpleNamespace(lora_request=lora(3, adapter)))
    reported = ("a request for an adapter with different files", True)
    assert connector.events == [reported]


def test_files_that_change_while_they_are_read_are_not_known(adapter: Path) -> None:
    connector = Connector()
    core = engine(connector, loads=lambda: make_adapter(adapter, b"meanwhile"))
    core.add_lora(lora(1, adapter))
    core.add_lora(lora(2, adapter))
    assert connector.events == [("add_lora with different files", True)]


def test_an_adapter_of_a_hub_may_have_moved() -> None:
    connector = Connector()
    core = engine(connector)
    core.add_lora(lora(1, Path("org/adapter")))
    assert connector.events == []
    core.add_lora(lora(2, Path("org/adapter")))
    assert connector.events == [("add_lora with different files", True)]


def test_adapters_that_were_forgotten_count_as_new() -> None:
    adapters = Adapters(adapters_max=2)
    changed = [adapters.note(lora(n, Path(f"/{n}")), "same") for n in (1, 2, 1, 3, 1, 3)]
    assert changed == [False, False, False, True, False, False]


def test_our_connector_is_found_among_several() -> None:
    connector = Connector()
    core = engine(SimpleNamespace(sub_connectors=[SimpleNamespace(), connector]))
    core.collective_rpc("reload_weights")
    assert connector.events == [("reload_weights", True)]


def test_an_engine_without_a_scheduler_yet_is_accepted() -> None:
    core = engine(None)
    del core.scheduler
    assert core.collective_rpc("load_model") == ["done"]


def test_an_unexpected_engine_is_refused() -> None:
    with pytest.raises(IntegrationError, match="EngineCore has no collective_rpc"):
        new_weights.install(type("EngineCore", (), {}))
