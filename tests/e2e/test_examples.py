# SPDX-License-Identifier: Apache-2.0
"""Runs the examples as a user would, and the backend as an argument of `LLM`. `test_wheel.py`
starts `02_serve.sh`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from vllm_nvmeof_bench.servers.server import Server, ServerSpec

from tests.e2e import servers as rig
from vllm_nvmeof_offload.units import GIB

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STAGING = f"{rig.STAGING_SLOTS * rig.SLOT_BYTES / GIB:.6f}"


def test_the_offline_example(tmp_path: Path) -> None:
    model = rig.spec().model
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / "03_offline_llm.py", model, tmp_path / "pool"],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"^(\d+) prompt tokens were loaded; answers: the same$", done.stdout, re.M)
    assert found, done.stdout
    assert int(found[1]) > 1000


@dataclass(frozen=True)
class ByManifest(ServerSpec):
    """A server started by the start line of examples/kubernetes, with small sizes."""

    target: str = ""

    def command(self, port: int) -> list[str]:
        manifest = (EXAMPLES / "kubernetes" / "hostpath" / "vllm.yaml").read_text()
        (server,) = (one for one in yaml.safe_load_all(manifest) if one["kind"] == "StatefulSet")
        (line,) = server["spec"]["template"]["spec"]["containers"][0]["args"]
        for old, new in (
            ("--target /mnt/kv/0 --target /mnt/kv/1", f"--target {self.target}"),
            ("--staging 64GiB", f"--staging {STAGING}GiB"),
            ("--kv-offloading-size 64", f"--kv-offloading-size {STAGING}"),
            (' --kv-transfer-config "$(cat /etc/vllm-kv/transfer.json)"', ""),
            ("vllm serve MODEL", shlex.join(["vllm", *super().command(port)[1:]])),
        ):
            assert line.count(old) == 1, old
            line = line.replace(old, new)
        return ["/bin/sh", "-c", line]


def test_a_target_that_is_not_mounted_leaves_a_server_with_its_cpu_tier(tmp_path: Path) -> None:
    if tmp_path.stat().st_dev != os.stat("/").st_dev:
        pytest.skip("the temporary directory is not on the root file system")
    target, plain = tmp_path / "kv", rig.spec()
    env = {
        **plain.env,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VLLM_NVMEOF_TARGETS": str(target),
        "VLLM_NVMEOF_POOL_BYTES": str(rig.POOL_SLOTS * rig.SLOT_BYTES),
        "VLLM_NVMEOF_CHUNK_BYTES_MIN": str(rig.SHAPE.kv_bytes_per_token * rig.CHUNK_TOKENS),
        "VLLM_NVMEOF_ADMISSION": "always",
        "VLLM_NVMEOF_ALLOW_ROOT_FILE_SYSTEM": "false",
    }
    sizes = (plain.model, plain.max_model_len, plain.gpu_blocks, plain.block_size)
    spec = ByManifest(*sizes, env=env, target=str(target))
    asked = rig.prompts()[:1]
    with Server(spec, rig.BUILD / "logs" / "not_mounted.log").wait_ready() as server:
        assert "no pool: the server uses only its CPU tier" in server.log()
        cold = rig.ask(server, asked)
        rig.forget_gpu(server)
        assert rig.same(rig.ask(server, asked), cold)
        assert rig.metrics(server).value("vllm:nvmeof_loaded_tokens_total", source="cpu") > 0
    assert not target.exists(), "nothing is written where the mount would be"


@pytest.mark.soak  # `test_examples.py` is a short version
def test_llm_takes_the_backend_as_an_argument(tmp_path: Path) -> None:
    reference = rig.reference()
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.llm_child", str(tmp_path / "pool")],
        cwd=Path(__file__).resolve().parents[2],
        env={**rig.spec().environment(), "VLLM_LOGGING_LEVEL": "WARNING"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [s for s in done.stdout.splitlines() if s.startswith("RESULT ")]
    seen = json.loads(line.removeprefix("RESULT "))
    expected = [answer.tokens for answer in reference.answers]
    assert seen["cold"] == expected
    assert seen["back"] == expected
    assert seen["hits"] > 0
