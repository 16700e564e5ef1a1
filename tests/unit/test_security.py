# SPDX-License-Identifier: Apache-2.0
"""Files on disk are private, never executed, and reveal no prompt; ports are closed."""

from __future__ import annotations

import ast
import ipaddress
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.pool.kit import fill, make_spec
from vllm_nvmeof_offload.commands.doctor.host import check_target
from vllm_nvmeof_offload.config import (
    ALLOW_FAULTS,
    EXPERIMENT,
    METRICS_ADDRESS,
    Replica,
    judge_access,
    parse_config,
)
from vllm_nvmeof_offload.copy import driver
from vllm_nvmeof_offload.errors import ConfigError, PoolError
from vllm_nvmeof_offload.exporter import ExporterSettings
from vllm_nvmeof_offload.fabric import Severity
from vllm_nvmeof_offload.pool.pool import Pool

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("vllm_nvmeof_offload", "bench", "kernels", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
#: Functions that execute the file that they read.
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "pandas.read_pickle"}
#: Every name that a pool may use: digests, numbers and constants.
NAMES = re.compile(
    r"[0-9a-f]{32}|engine-\d+|rank-\d+|slab|table|log|superblock|sessions|lock|lease|keyspace\.json"
)


def unsafe_in(source: str) -> list[str]:
    """The calls of a Python source that would execute or unpickle a file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if (node.module or "").split(".")[0] in MODULES else []
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            allows = any(
                keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"
                for keyword in node.keywords
            )
            found += [name] if name in CALLS or allows else []
    return found


#: A benchmark of what vLLM does with each command: it unpickles what it has just pickled.
MEASURES_PICKLES = "bench/vllm_nvmeof_bench/chunks.py"


def test_nothing_read_from_disk_is_executed_or_unpickled() -> None:
    found = {str(p.relative_to(ROOT)): unsafe_in(p.read_text()) for p in SOURCES}
    assert found.pop(MEASURES_PICKLES) == ["pickle"]
    assert found == {name: [] for name in found}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "torch.load(file)",
        "np.load(file, allow_pickle=True)",
        "def f(text):\n    return eval(text)",
    ],
)
def test_the_check_finds_each_forbidden_call(source: str) -> None:
    assert unsafe_in(source)


def test_names_on_disk_reveal_nothing_of_a_prompt(tmp_path: Path) -> None:
    pool = Pool.open(make_spec(tmp_path / "target", engine="some-engine"))
    fill(pool)
    pool.save_sessions(b"of requests with a salt and a name")
    assert pool.await_superblocks(120.0)
    pool.close()
    names = [path.name for path in (tmp_path / "target").rglob("*")]
    files = {"slab", "table", "log", "superblock", "sessions", "lock", "lease", "keyspace.json"}
    assert files <= {*names}
    assert [name for name in names if not NAMES.fullmatch(name)] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["keyspace", "engine-0", "rank-0", "slab", "table", "log"])
def test_files_of_another_user_are_refused_by_name(tmp_path: Path, name: str) -> None:
    spec = make_spec(tmp_path / "target")
    pool = Pool.open(spec)
    directory = pool.directories[0]
    fill(pool)
    pool.close()
    places = {"keyspace": directory.parents[1], "engine-0": directory.parent, "rank-0": directory}
    place = places.get(name, directory / name)
    os.chown(place, 54321, -1)
    with pytest.raises(PoolError, match=f"{place.name}.*uid 54321|uid 54321.*{place.name}"):
        Pool.open(spec)
    os.chown(place, os.geteuid(), -1)
    Pool.open(spec).close()


@pytest.mark.parametrize(("mode", "uid"), [(0o600, 54321), (0o602, 0), (0o620, 0)])
def test_machine_code_that_another_user_could_write_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, uid: int
) -> None:
    monkeypatch.setattr(driver, "compile_kernels", lambda arch, name: b"compiled here")
    assert driver.load_or_compile("sm_90", tmp_path) == b"compiled here"
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"planted")
    assert driver.load_or_compile("sm_90", tmp_path) == b"planted", "as from this user"
    file.chmod(mode)
    if uid:
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(file, uid, -1)
    assert driver.load_or_compile("sm_90", tmp_path) == b"compiled here"
    assert file.read_bytes() == b"compiled here", "replaced"


FAULTS = {EXPERIMENT: json.dumps({"fault_injection": "/faults.json"})}


@pytest.mark.parametrize("switch", [None, "", "0", "true"])
def test_faults_are_refused_without_the_second_switch(switch: str | None) -> None:
    env = FAULTS if switch is None else {**FAULTS, ALLOW_FAULTS: switch}
    with pytest.raises(ConfigError, match=f"out or, for a test, .*{ALLOW_FAULTS}=1") as e:
        parse_config({}, env)
    assert e.value.key == "fault_injection"
    allowed = parse_config({}, {**env, ALLOW_FAULTS: "1"})
    assert allowed.tuning.fault_injection == "/faults.json"


def test_faults_are_no_part_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        parse_config({"fault_injection": "/faults.json"}, {ALLOW_FAULTS: "1"})
    with pytest.raises(ConfigError, match="unknown environment variable"):
        parse_config({}, {"VLLM_NVMEOF_FAULT_INJECTION": "/faults.json", ALLOW_FAULTS: "1"})


def test_the_second_switch_is_an_environment_variable_and_injects_nothing_by_itself() -> None:
    assert parse_config({}, {ALLOW_FAULTS: "1"}).tuning.fault_injection is None
    for key in ("allow_fault_injection", ALLOW_FAULTS):
        with pytest.raises(ConfigError, match="unknown key"):
            parse_config({key: 1}, FAULTS)


@pytest.mark.parametrize(
    ("mode", "exposed"),
    [(0o700, False), (0o755, False), (0o777, True), (0o770, True), (0o702, True), (0o1777, False)],
)
def test_a_target_writable_by_others_is_reported(tmp_path: Path, mode: int, exposed: bool) -> None:
    tmp_path.chmod(mode)
    problem, remedy = judge_access(str(tmp_path))
    assert bool(problem) == exposed
    assert ("can be written by other users" in problem) == exposed
    assert ("chmod 0700" in remedy) == exposed
    (finding,) = [f for f in check_target(str(tmp_path)) if f.check == "target_access"]
    assert finding.severity is (Severity.WARNING if exposed else Severity.OK)
    assert (finding.remedy == remedy) or not exposed


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a directory to another user needs root")
@pytest.mark.parametrize("mode", [0o700, 0o1777])
def test_a_target_of_another_user_is_reported(tmp_path: Path, mode: int) -> None:
    target = tmp_path / "theirs"
    target.mkdir()
    target.chmod(mode)
    os.chown(target, 12345, 12345)
    problem, remedy = judge_access(str(target))
    assert problem.startswith("belongs to uid 12345")
    assert remedy.startswith(f"chown 0 {target}")


def test_a_start_warns_once_about_each_exposed_target_and_about_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("vllm")
    from vllm_nvmeof_offload.vllm_adapter import supported

    for name in ("slot_bytes_estimate", "note_weights"):
        monkeypatch.setattr(supported, name, lambda *_: None)
    for name, value in {**FAULTS, ALLOW_FAULTS: "1"}.items():
        monkeypatch.setenv(name, value)
    private, shared = tmp_path / "private", tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    parallel = SimpleNamespace(world_size=1, data_parallel_size=1, enable_elastic_ep=False)
    extra = {"targets": [str(private), str(shared)], "staging_bytes": "64MiB"}
    supported.precheck(SimpleNamespace(parallel_config=parallel), extra, "staging_bytes")
    logged = [record.getMessage() for record in caplog.records]
    (warning,) = [line for line in logged if "nvmeof: target " in line]
    assert f"target {shared} can be written by other users (mode 0777" in warning
    assert "chmod 0700" in warning
    assert sum("FAULT INJECTION is on" in line for line in logged) == 1


# -- ports ----------------------------------------------------------------------------------

#: The modules that listen, each with the key that opens its port.
LISTEN = {
    "vllm_nvmeof_offload/exporter.py": "metrics_listen",
    "vllm_nvmeof_offload/peers/server.py": "peer_listen",
}
#: The module that listens on a Unix socket, for the other ranks.
LOCAL = "vllm_nvmeof_offload/worker/membership.py"
#: The module that binds to a configured address for a moment, to tell whether a server could.
TRIES = "vllm_nvmeof_offload/targets/configured.py"
OPENS = re.compile(
    r"\b(make_server|create_server|start_http_server|HTTPServer)\(|"
    r"\b(?!signature|shape)\w+\.(bind|listen)\("
)


def test_only_two_modules_open_ports_and_each_has_a_key_that_is_documented() -> None:
    package = ROOT / "vllm_nvmeof_offload"
    found = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*.py")
        if OPENS.search(path.read_text())
    }
    assert found == {*LISTEN, LOCAL, TRIES}
    found -= {LOCAL, TRIES}
    text = (ROOT / "docs" / "security.md").read_text()
    for name in found:
        assert f"`{LISTEN[name]}`" in text


def test_no_port_is_open_by_default_and_the_default_address_is_loopback() -> None:
    settings = parse_config({}, {})
    assert (settings.peer_listen, settings.metrics_listen) == ("", "auto")
    off = ExporterSettings(settings.metrics_listen, Replica(), {}, is_dropped=False)
    assert not off.is_on
    assert ipaddress.ip_address(METRICS_ADDRESS.rpartition(":")[0]).is_loopback
