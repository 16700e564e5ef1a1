# SPDX-License-Identifier: Apache-2.0
"""The `vllm-nvmeof` command without the demo, which has a separate test."""

from __future__ import annotations

import json
import os
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from vllm_nvmeof_offload import __version__
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.commands import EXIT_CODES, FAILED
from vllm_nvmeof_offload.commands.pool.check import Damage
from vllm_nvmeof_offload.config import OffloadConfig
from vllm_nvmeof_offload.fabric.findings import Severity

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
    named = {"kv_connector": "NVMeoFOffloadingConnector", "kv_connector_extra_config": extra}
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
    ],
)
def test_config_check_refuses_in_one_plain_line(source: str, message: str) -> None:
    result = runner.invoke(app, ["config", "check", source])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_config_check_and_doctor_create_no_target_that_is_missing(tmp_path: Path) -> None:
    target = tmp_path / "mnt" / "kv"
    checked = runner.invoke(app, ["config", "check", json.dumps({"targets": str(target)})])
    assert checked.exit_code == 0
    assert f"{target} does not exist" in checked.stderr
    examined = runner.invoke(app, ["doctor", "--target", str(target), "--json"])
    assert examined.exit_code == 1
    assert "does not exist; a start would create it on" in examined.stdout
    assert not target.parent.exists()


def test_doctor_says_whether_a_pool_fits(tmp_path: Path) -> None:
    for size, code in (("1MiB", "ok"), ("100TiB", "error"), ("much", "error")):
        arguments = ["doctor", "--target", str(tmp_path), "--pool", size, "--json"]
        found = json.loads(runner.invoke(app, arguments).stdout)["findings"]
        (finding,) = [one for one in found if one["check"] == "pool_space"]
        assert finding["severity"] == code
    assert "at most" not in finding["evidence"]


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
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if metrics is None else 200)
            self.end_headers()
            self.wfile.write((metrics or "").encode())

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        arguments = ["doctor", "--target", str(tmp_path), "--url", url, "--json"]
        found = json.loads(runner.invoke(app, arguments).stdout)["findings"]
        server.shutdown()
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
