# SPDX-License-Identifier: Apache-2.0
"""The `vllm-nvmeof` command and `try`. The demo has a separate test."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.exporter import Exporter
from tests.unit.bench.made_up_server import MadeUpServer
from vllm_nvmeof_offload import __version__
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.commands import EXIT_CODES, FAILED
from vllm_nvmeof_offload.commands.pool.check import Damage
from vllm_nvmeof_offload.commands.try_server import Tried
from vllm_nvmeof_offload.config import OffloadConfig
from vllm_nvmeof_offload.fabric import Severity

NOT_ON_ROOT = '"allow_root_file_system": false'
CONNECTOR = '"NVMeoFOffloadingConnector"'

runner = CliRunner()


def test_the_version_is_a_command_and_an_option() -> None:
    shown = [runner.invoke(app, [word]) for word in ("version", "--version")]
    assert [one.exit_code for one in shown] == [0, 0]
    assert shown[0].stdout == shown[1].stdout
    assert __version__ in shown[0].stdout


def test_each_exit_code_is_in_the_one_table_which_help_shows() -> None:
    assert {FAILED, *Severity, *Damage} <= set(EXIT_CODES)
    for words in ([], ["doctor"], ["pool", "check"]):
        shown = runner.invoke(app, [*words, "--help"], env={"COLUMNS": "300"}).stdout
        for code, says in EXIT_CODES.items():
            assert f"{code}: {says}." in shown


def test_config_lists_every_key_for_people_and_for_programs() -> None:
    table = runner.invoke(app, ["config"], env={"COLUMNS": "200"})
    assert table.exit_code == 0
    rows = json.loads(runner.invoke(app, ["config", "--json"]).stdout)
    assert {row["key"] for row in rows} == set(OffloadConfig.model_fields)
    for row in rows:
        assert row["key"] in table.stdout


@pytest.mark.parametrize("whole", [True, False])
def test_config_check_accepts_the_whole_json_or_our_part_of_it(tmp_path: Path, whole: bool) -> None:
    extra = {"targets": str(tmp_path / "pool"), "pool_bytes": "1GiB", "staging_bytes": "1GiB"}
    named = {
        "kv_connector": "NVMeoFOffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    value = named if whole else extra
    file = tmp_path / "config.json"
    file.write_text(json.dumps(value))
    for source in (json.dumps(value), str(file)):
        result = runner.invoke(app, ["config", "check", source, "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["pool_bytes_resolved"] == 1 << 30


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('{"targts": 1}', "targts=1: unknown key; did you mean targets?"),
        ("{", "does not parse"),
        ("/proc/no/such/file", "cannot be read (No such file or directory)"),
        ('{"staging_bytes": "1000TiB"}', "this machine has"),
        ('{"POOL_BYTES": 1}', "did you mean pool_bytes?"),
        ('{"kv_connector": "NVMeOFOffloadingConnector"}', "did you mean NVMeoFOffloadingConn"),
        ('{"pool_bytes": "100TiB", "targets": "/dev/shm/pool"}', "stay free; give at most"),
        ('{"share_secret_file": "/no such/file"}', "cannot be read"),
        (f'{{"targets": "/no/kv/0", {NOT_ON_ROOT}}}', "does not exist and would be created on the"),
        ('{"targets": "/dev/shm/a:/dev/shm/b"}', "does not exist and looks like two paths"),
        ('{"targets": "/dev/shm/a,/dev/shm/b"}', "does not exist and looks like two paths"),
        ('{"targets": "$HOME/kv"}', "the variable in $HOME/kv is not expanded here"),
        ('{"targets": [1]}', "element 0, a value of type int, cannot be used; give one path"),
        ('{"peers": [7000]}', "element 0, a value of type int, cannot be used"),
        ('{"kv_connector": "LMCacheConnector"}', "another backend, or a typo"),
        (f'{{"kv_connector": {CONNECTOR}}}', "vLLM needs a role with kv_connector; give kv_both"),
        (f'{{"kv_connector": {CONNECTOR}, "kv_role": "kv_producer"}}', "engine; give kv_both"),
        (
            '{"kv_role": "kv_both", "pool_bytes": 0}',
            "put this package's keys into kv_conn",
        ),
        ('{"kv_connector": "MultiConnector", "kv_role": "kv_both"}', "none of its connectors is"),
        ('{"kv_connector_extra_config": []}', "not an object; give"),
        ('{"peer_listen": "0.0.0.0:7000"}', "give a share_secret_file"),
    ],
)
def test_config_check_refuses_in_one_plain_line(source: str, message: str) -> None:
    result = runner.invoke(app, ["config", "check", source])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def checked(source: object, *words: str, code: int = 0) -> Any:
    """Return the output of `config check --json`."""
    text = source if isinstance(source, str) else json.dumps(source)
    result = runner.invoke(app, ["config", "check", text, *words, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def keys_of(found: Any) -> list[str]:
    return [error["key"] for error in found["errors"]]


def test_config_check_reports_all_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {
        "foo": 1,
        "staging_bytes": "1000TiB",
        "o_direct": 3,
        "share": "group",
        "peers": "d0:1",
        "targets": ["/proc/no"],
        "share_secret_file": "/no",
        "eviction_policy": "none",
    }
    monkeypatch.setenv("VLLM_NVMEOF_FO", "1")
    found = checked(extra, code=2)
    expected = ["VLLM_NVMEOF_FO", "foo", "o_direct", "staging_bytes", "targets"]
    assert keys_of(found) == [*expected, "share_secret_file", "eviction_policy"]
    shown = runner.invoke(app, ["config", "check", json.dumps(extra)]).stderr
    assert shown.splitlines() == [f"vllm-nvmeof: {one['message']}" for one in found["errors"]]


def test_config_check_with_a_model_says_what_a_server_would_say(tmp_path: Path) -> None:
    sizes = {"targets": str(tmp_path), "staging_bytes": "64KiB", "pool_bytes": "1KiB"}
    extra = {**sizes, "allow_root_file_system": True}
    assert checked(extra)["errors"] == []
    found = checked(extra, "--model", "Qwen3-8B", code=2)
    assert keys_of(found) == ["staging_bytes", "pool_bytes"]
    assert "3 slots of 2.3 MiB on each of 1 rank(s); give at least" in found["errors"][0]["message"]
    assert keys_of(checked({"block_size": 20}, "--model", "Qwen3-8B", code=2)) == ["block_size"]
    states = "Qwen/Qwen3-Next-80B-A3B-Instruct"
    found = checked({"blocks_per_chunk": 4}, "--model", states, code=2)
    assert keys_of(found) == ["blocks_per_chunk"]
    assert keys_of(checked("{}", "--model", str(tmp_path / "no"), code=2)) == ["--model"]
    source = '{"boundary_tokens": 1000, "blocks_per_chunk": 4}'
    shown = runner.invoke(app, ["config", "check", source, "--model", "gpt-oss-120b"])
    assert "chunks of 64 tokens" in shown.stdout
    assert "a boundary every 1024 tokens" in shown.stdout


@pytest.mark.parametrize(
    "transfer",
    [
        'kv_transfer_config: \'{"kv_connector_extra_config": {"pool_bytes": "1KiB"}}\'',
        "kv-transfer-config:\n  kv_connector_extra_config:\n    pool_bytes: 1KiB",
        "kv-transfer-config.kv_connector_extra_config.pool_bytes: 1KiB",
    ],
)
def test_config_check_reads_vllms_yaml_file(tmp_path: Path, transfer: str) -> None:
    file = tmp_path / "serve.yaml"
    flags = "kv-offloading-backend: nvmeof\nkv_offloading_size: 0.001\ndata-parallel-size: 2\n"
    file.write_text(f"model: Qwen/Qwen3-8B\ntensor-parallel-size: 2\n{flags}{transfer}\n")
    found = checked(str(file), code=2)
    assert found["config"]["staging_bytes"] == int(0.001 * (1 << 30))
    assert keys_of(found) == ["staging_bytes", "pool_bytes"]
    assert "on each of 4 rank(s)" in found["errors"][0]["message"]
    file.write_text(f"model: some/model\n{flags}kv-offloading-size: 1\n")
    assert "some/model were not checked" in " ".join(checked(str(file))["warnings"])
    for option in ("kv-offloading-size", "data-parallel-size", "tensor-parallel-size"):
        for wrong in ("much", "[1]"):
            file.write_text(f"{flags}{option}: {wrong}\n")
            assert f"--{option}" in keys_of(checked(str(file), code=2))
    file.write_text(f"{flags}kv-transfer-config: [1]\n")
    assert keys_of(checked(str(file), code=2)) == ["JSON"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: some/model", "the file does not select this backend"),
        ("kv-offloading-backend: native", "the file does not select this backend"),
        ("a: [", "does not parse"),
        ("- a", "not an object; give"),
    ],
)
def test_a_yaml_file_that_does_not_start_this_backend_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "serve.yml"
    file.write_text(text)
    assert message in checked(str(file), code=2)["errors"][0]["message"]


def test_config_check_warns_of_what_works_but_is_rarely_meant(tmp_path: Path) -> None:
    one, two = tmp_path / "d0", tmp_path / "d0" / "sub"
    two.mkdir(parents=True)
    extra = {"targets": [str(one), str(two)], "allow_root_file_system": True}
    (warning,) = checked(extra)["warnings"]
    assert warning.startswith("2 targets share the space and rate of ")
    assert checked({**extra, "targets": str(one)})["warnings"] == []
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    secured = {"share_secret_file": str(secret)}
    (warning,) = checked({**secured, "peers": "no-such-host.invalid:7000"})["warnings"]
    assert "no address is known for no-such-host.invalid" in warning
    for key in ("peer_listen", "metrics_listen"):
        (warning,) = checked({**secured, key: "0.0.0.0:65431"})["warnings"]
        assert f"{key}='0.0.0.0:65431' opens the port on every network" in warning
        found = checked({**secured, key: "192.0.2.1:65431"}, code=2)
        assert "cannot listen there" in found["errors"][0]["message"]
        with socket.create_server(("127.0.0.1", 0)) as taken:
            listen = f"127.0.0.1:{taken.getsockname()[1]}"
            (warning,) = checked({key: listen})["warnings"]
        assert "the port is in use now" in warning
    found = checked({"metrics_listen": str(tmp_path / "none" / "x.prom")}, code=2)
    assert "create it, and give this user write access" in found["errors"][0]["message"]


def test_config_shows_a_key_as_it_is_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NVMEOF_POOL_BYTES", "1GiB")
    for name in ("pool_bytes", "VLLM_NVMEOF_POOL_BYTES"):
        shown = runner.invoke(app, ["config", "show", name]).stdout
        assert "Set here: VLLM_NVMEOF_POOL_BYTES=1GiB" in shown
        assert "0 for none" in shown
    row = json.loads(runner.invoke(app, ["config", "show", "pool_bytes", "--json"]).stdout)
    assert (row["environment"], row["unit"]) == ("1GiB", "bytes")
    assert row["default"] > 0
    assert "No environment variable" in runner.invoke(app, ["config", "show", "block_size"]).stdout
    refused = runner.invoke(app, ["config", "show", "poolbytes"])
    assert (refused.exit_code, "did you mean pool_bytes?" in refused.stderr) == (FAILED, True)


def test_config_check_and_doctor_create_no_target_that_is_missing(tmp_path: Path) -> None:
    target = tmp_path / "mnt" / "kv"
    result = runner.invoke(app, ["config", "check", json.dumps({"targets": str(target)})])
    assert result.exit_code == 0
    assert f"{target} does not exist" in result.stderr
    examined = runner.invoke(app, ["doctor", "--target", str(target), "--json"])
    assert examined.exit_code == 1
    assert "does not exist; a server would create it on" in examined.stdout
    assert not target.parent.exists()


def test_doctor_refuses_the_targets_that_a_server_refuses(tmp_path: Path) -> None:
    if tmp_path.stat().st_dev != os.stat("/").st_dev:
        pytest.skip("the temporary directory is on a file system of its own")
    for target, words in ((tmp_path, "is on"), (tmp_path / "no", "does not exist and would be")):
        given = ["doctor", "--target", str(target), "--json"]
        env = {"VLLM_NVMEOF_ALLOW_ROOT_FILE_SYSTEM": "false"}
        examined = runner.invoke(app, given, env=env)
        assert examined.exit_code == 2
        found = {one["check"]: one for one in json.loads(examined.stdout)["findings"]}
        assert found["target"]["severity"] == "error"
        assert words in found["target"]["evidence"]
        assert "root file system" in found["target"]["evidence"]
        assert "allow_root_file_system" in found["target"]["remedy"]


@pytest.mark.parametrize(
    ("metrics", "severity"),
    [
        ('vllm:nvmeof_unwritten_chunks_total{engine="0",reason="evicted"} 0.0', "ok"),
        ('vllm:nvmeof_unwritten_chunks_total{engine="0",reason="evicted"} 3.0', "warning"),
        ('vllm:nvmeof_unwritten_chunks_total{engine="0",reason="superseded"} 3.0', "warning"),
        ("vllm:num_requests_running 1.0", "warning"),
        (None, "error"),
    ],
)
def test_doctor_shows_a_servers_holes(tmp_path: Path, metrics: str | None, severity: str) -> None:
    with Exporter([metrics]) as exporter:
        url = f"http://{exporter.address}"
        arguments = ["doctor", "--target", str(tmp_path), "--url", url, "--json"]
        found = json.loads(runner.invoke(app, arguments).stdout)["findings"]
    (finding,) = [one for one in found if one["check"] == "holes"]
    assert finding["severity"] == severity


def test_config_check_takes_foreign_files_on_a_target_for_no_part_of_the_default_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(total=1 << 40, used=0, free=1 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with (tmp_path / "data.parquet").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 16 << 20)
    source = json.dumps({"targets": str(tmp_path)})
    result = runner.invoke(app, ["config", "check", source, "--json"])
    assert json.loads(result.stdout)["pool_bytes_resolved"] == 1 << 29


# `vllm-nvmeof try` on a fake server: proofs that a prompt was loaded, and refusals.


TOKENS = 200
GPU_TOKENS = 1600
ROOM = (
    'vllm:nvmeof_capacity_tokens{tier="pool"} 5000\n'
    'vllm:nvmeof_capacity_tokens{tier="cpu"} 90\n'
    "vllm:num_requests_running 0\n"
)
SIZE = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'


def attempt(server: MadeUpServer, *more: str) -> Result:
    words = ["try", "--url", server.url, "--tokens", str(TOKENS), *more]
    return CliRunner().invoke(app, words)


def found(server: MadeUpServer) -> dict[str, Any]:
    result = attempt(server, "--json")
    assert result.exit_code in (0, 1), result.output
    tried: dict[str, Any] = json.loads(result.stdout)
    assert tried["proved"] is (result.exit_code == 0)
    return tried


def test_a_returning_prompt_is_loaded_after_a_reset() -> None:
    with MadeUpServer(page=ROOM) as server:
        tried = found(server)
        shown = attempt(server)
    assert tried["proved"] and tried["same_answer"] and not tried["warnings"]
    assert tried["tokens"] == {"gpu": 0, "cpu": TOKENS, "pool": 0, "shared": 0, "computed": 0}
    assert tried["emptied"] == "emptied by /reset_prefix_cache"
    assert tried["first_ttft_s"] > 0 and tried["second_ttft_s"] > 0
    assert "loaded from a tier" in shown.stdout
    assert f"CPU tier {TOKENS}, pool 0" in shown.stdout


def test_it_names_the_measured_request_for_explain() -> None:
    with MadeUpServer(page=ROOM) as server:
        tried = found(server)
        before = server.asked
        shown = attempt(server).stdout
    # The prompt, two short requests for counters, the prompt again, and one for counters.
    assert tried["second_id"] == f"cmpl-{before - 1}"
    (line,) = (line for line in shown.splitlines() if line.startswith("details"))
    assert line.endswith(f" vllm-nvmeof explain cmpl-{2 * before - 1}")


def test_other_prompts_replace_the_gpus_content_where_it_cannot_be_reset() -> None:
    with MadeUpServer(page=ROOM + SIZE, resets=False, gpu_tokens=GPU_TOKENS) as server:
        tried = found(server)
        asked = server.counts["prompt"]
    assert tried["proved"] and tried["tokens"]["cpu"] == TOKENS
    assert tried["emptied"].startswith("flooded with ")
    assert GPU_TOKENS + TOKENS <= asked < GPU_TOKENS + 5 * TOKENS, "the flood is bounded"


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (ROOM, "vllm:cache_config_info has no num_gpu_blocks"),
        (ROOM + SIZE.replace('"100"', '"None"'), "vllm:cache_config_info has no num_gpu_blocks"),
        (
            ROOM.replace("5000", "1900") + SIZE,
            "it holds 1,600 tokens, too many for the larger tier (1,900)",
        ),
    ],
)
def test_it_says_why_the_gpus_cache_cannot_be_emptied(page: str, why: str) -> None:
    with MadeUpServer(page=page, resets=False) as server:
        result = attempt(server)
    assert result.exit_code == 2
    assert why in result.stderr and "VLLM_SERVER_DEV_MODE=1" in result.stderr


def test_another_answer_is_no_proof() -> None:
    with MadeUpServer(page=ROOM, wavers=True) as server:
        tried = found(server)
    assert not tried["proved"] and not tried["same_answer"]
    assert tried["tokens"]["cpu"] == TOKENS


def test_a_prompt_that_stays_in_gpu_memory_is_no_proof() -> None:
    with MadeUpServer(page=ROOM + SIZE, resets=False) as server:
        tried = found(server)
    assert not tried["proved"] and tried["same_answer"]
    assert tried["tokens"]["gpu"] == TOKENS


def test_a_prompt_that_was_not_stored_is_not_sent_again() -> None:
    with MadeUpServer(page=ROOM) as server:
        result = CliRunner().invoke(app, ["try", "--url", server.url, "--tokens", "20"])
        asked = server.asked
    assert result.exit_code == 1
    assert "was not stored" in result.stderr and "NOT PROVED" in result.stdout
    assert asked == 2, "the prompt, and the request before the metrics are read"


def test_an_address_without_a_server_is_refused_in_one_line() -> None:
    result = CliRunner().invoke(app, ["try", "--url", "http://[::1"])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert "no answer" in result.stderr and result.stderr.count("\n") == 1


def test_a_models_name_cannot_control_the_terminal() -> None:
    with MadeUpServer(page=ROOM, model="a\x1b[2J") as server:
        result = attempt(server)
    assert "model a\\x1b[2J" in result.stdout and "\x1b" not in result.stdout


def test_other_traffic_is_reported() -> None:
    with MadeUpServer(page=ROOM.replace("running 0", "running 3"), others=10) as server:
        (running, tokens) = found(server)["warnings"]
    assert running.startswith("3 other requests were running")
    assert tokens.startswith("20 prompt tokens of other requests")


@pytest.mark.parametrize(
    ("second_s", "text"),
    [
        (0.5, "4.0 times as fast"),
        (2.0, "1.0 times as fast"),
        (2.1, "1.0 times as fast"),
        (6.0, "slower: 3.0 times as long"),
    ],
)
def test_a_slower_second_time_is_called_slower(second_s: float, text: str) -> None:
    assert Tried("", "", 1, first_ttft_s=2.0, second_ttft_s=second_s).compared == text


@pytest.mark.parametrize("fails", [-1, TOKENS], ids=["models", "prompt"])
@pytest.mark.parametrize(
    ("refusal", "why"),
    [
        ('{"error": {"message": "no such\\nmodel", "code": 503}}', "no such model"),
        ('{"error": "Unauthorized"}', "Unauthorized"),
        ('{"detail": "Not Found"}', "Not Found"),
        ("", "Service Unavailable"),
        ("<p>", "<p>"),
    ],
)
def test_a_refusal_is_one_sentence(fails: int, refusal: str, why: str) -> None:
    with MadeUpServer(page=ROOM, fails=fails, refusal=refusal) as server:
        result = attempt(server)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith(f": HTTP 503: {why}\n")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"metrics": False}, "HTTP 404"),
        ({}, "exports no vllm:nvmeof_"),
    ],
)
def test_a_server_that_cannot_be_tried_is_refused_in_one_line(
    options: dict[str, Any], why: str
) -> None:
    with MadeUpServer(**options) as server:
        result = attempt(server)
    assert result.exit_code == 2
    assert why in result.stderr.splitlines()[-1]
