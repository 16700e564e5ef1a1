# SPDX-License-Identifier: Apache-2.0
"""The examples that need no vLLM run; scripts and manifests match their texts."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_nvmeof_offload.config import parse_config
from vllm_nvmeof_offload.units import parse_bytes

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.rglob("*.sh"))
UNITS = sorted((EXAMPLES / "systemd").iterdir())
CALLS = {"io_uring_setup", "io_uring_enter", "io_uring_register"}


def run(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_round_trip(tmp_path: Path) -> None:
    output = run(sys.executable, EXAMPLES / "01_roundtrip.py", tmp_path / "pool")
    assert "16 chunks adopted" in output
    assert "every byte is correct" in output
    assert "CHECKSUM_MISMATCH" in output


def test_the_custom_policy_runs_its_example() -> None:
    output = run(sys.executable, EXAMPLES / "04_custom_policy.py")
    assert re.search(r"^SecondChance +\d+ of 20000 chunks were hits", output, re.MULTILINE)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_shell_scripts_parse_stop_at_errors_and_explain_themselves(path: Path) -> None:
    run("bash", "-n", path)
    text = path.read_text()
    assert text.startswith("#!/")
    assert re.search(r"^set -[a-z]*e", text, re.MULTILINE)


def test_serving_without_targets_names_the_missing_setting() -> None:
    script = EXAMPLES / "02_serve.sh"
    for arguments, message in (((), "usage: "), (("model",), "name the directories")):
        done = subprocess.run(
            ["bash", script, *arguments], capture_output=True, text=True, env={"PATH": "/bin"}
        )
        assert done.returncode == 1
        assert message in done.stderr


@pytest.fixture(scope="module")
def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration in the ConfigMap, and the pod."""
    config, server = yaml.safe_load_all((EXAMPLES / "kubernetes" / "vllm.yaml").read_text())
    assert (config["kind"], server["kind"]) == ("ConfigMap", "StatefulSet")
    pod = server["spec"]["template"]["spec"]
    extra = json.loads(config["data"]["transfer.json"])["kv_connector_extra_config"]
    return extra, pod


def test_the_manifests_configuration_is_the_products(
    manifest: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    extra, pod = manifest
    config = parse_config(extra, env={})
    (container,) = pod["containers"]
    (script,) = container["args"]
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "kv")
    for target in config.targets:
        assert target.startswith(mount["mountPath"] + "/")
        assert f"--target {target}" in script
    (size,) = re.findall(r"--kv-offloading-size (\d+)", script)
    assert f"--staging {size}GiB" in script
    # Staging, and at least half as much again for what vLLM takes.
    memory = parse_bytes(container["resources"]["limits"]["memory"] + "B")
    assert memory >= 1.5 * parse_bytes(f"{size}GiB")
    assert config.io_engine == "uring"


def test_the_manifest_matches_its_readme(
    manifest: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    _, pod = manifest
    assert pod["securityContext"]["seccompProfile"]["type"] == "Localhost"
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["nodeSelector"]
    (container,) = pod["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {*volumes}
    assert "hostPath" in volumes["kv"]
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    text = (EXAMPLES / "kubernetes" / "vllm.yaml").read_text()
    numbers = set(re.findall(r"\((\d)\)", text))
    assert numbers == set(re.findall(r"\((\d)\)", (EXAMPLES / "kubernetes/README.md").read_text()))


def test_the_seccomp_profile_allows_three_calls_more_and_no_other(tmp_path: Path) -> None:
    default = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "syscalls": [
            {"names": ["read", "write"], "action": "SCMP_ACT_ALLOW"},
            {"names": ["io_uring_setup", "bpf"], "action": "SCMP_ACT_ERRNO"},
            {"names": ["io_uring_enter"], "action": "SCMP_ACT_ERRNO"},
        ],
    }
    path = tmp_path / "default.json"
    path.write_text(json.dumps(default))
    made = json.loads(run(sys.executable, EXAMPLES / "kubernetes" / "seccomp.py", path))
    assert made["defaultAction"] == "SCMP_ACT_ERRNO"
    allowed = {n for r in made["syscalls"] if r["action"] == "SCMP_ACT_ALLOW" for n in r["names"]}
    denied = {n for r in made["syscalls"] if r["action"] != "SCMP_ACT_ALLOW" for n in r["names"]}
    assert allowed == {"read", "write", *CALLS}
    assert denied == {"bpf"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
@pytest.mark.parametrize("path", UNITS, ids=lambda p: p.name)
def test_systemd_accepts_the_units(path: Path, tmp_path: Path) -> None:
    for unit in UNITS:
        shutil.copy(unit, tmp_path / unit.name.replace("@.", "@kv0."))
    name = path.name.replace("@.", "@kv0.")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)],
        capture_output=True,
        text=True,
    )
    # Programs that are not installed here are none of the unit's faults.
    faults = [line for line in done.stderr.splitlines() if "is not executable" not in line]
    assert not [line for line in faults if any(unit.stem in line for unit in UNITS)], done.stderr


def test_the_units_agree_with_each_other() -> None:
    units = {}
    for path in UNITS:
        parser = configparser.RawConfigParser(strict=False, interpolation=None)
        parser.read(path)
        units[path.name] = parser
    vllm, mount = units["vllm.service"], units["mnt-kv-0.mount"]
    assert vllm["Service"]["LimitMEMLOCK"] == "infinity"
    assert vllm["Service"]["UMask"] == "0077"
    assert vllm["Unit"]["Requires"] == "mnt-kv-0.mount"
    assert "noatime" in mount["Mount"]["Options"].split(",")
    where = mount["Mount"]["Where"]
    assert vllm["Service"]["ReadWritePaths"] == where
    text = (EXAMPLES / "systemd" / "vllm.service").read_text()
    assert f"VLLM_NVMEOF_TARGETS={where}\n" in text
    assert f"--target {where} " in text
    connect = (EXAMPLES / "systemd" / "nvme-kv@.service").read_text()
    assert "fast_io_fail_tmo=5" in connect
