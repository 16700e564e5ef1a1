# SPDX-License-Identifier: Apache-2.0
"""The examples that need no vLLM run; scripts and manifests match their texts."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_nvmeof_offload.config import parse_config
from vllm_nvmeof_offload.units import parse_bytes

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
MANIFEST = EXAMPLES / "kubernetes" / "hostpath" / "vllm.yaml"
#: Has the schemas of Kubernetes's releases.
VALIDATOR = "kubernetes-validate==1.37.0"
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
    config, service, server = yaml.safe_load_all(MANIFEST.read_text())
    kinds = [one["kind"] for one in (config, service, server)]
    assert kinds == ["ConfigMap", "Service", "StatefulSet"]
    pod = server["spec"]["template"]["spec"]
    extra = json.loads(config["data"]["transfer.json"])["kv_connector_extra_config"]
    return extra, pod


def test_the_manifests_configuration_is_the_products(
    manifest: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    extra, pod = manifest
    (container,) = pod["containers"]
    config = parse_config(extra, {one["name"]: one["value"] for one in container["env"]})
    assert config.pool_bytes, (
        "the fallback sets the variable, and the ConfigMap must not override it"
    )
    assert "pool_bytes" not in extra
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
    numbers = set(re.findall(r"\((\d+)\)", MANIFEST.read_text()))
    readme = (EXAMPLES / "kubernetes" / "README.md").read_text()
    assert numbers == set(re.findall(r"\((\d+)\)", readme))


def test_the_service_leads_to_the_servers_port() -> None:
    _, service, server = yaml.safe_load_all(MANIFEST.read_text())
    assert server["spec"]["serviceName"] == service["metadata"]["name"]
    template = server["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["clusterIP"] == "None", "each pod has a name of its own"
    assert not template["spec"]["enableServiceLinks"], "VLLM_PORT would be a URI"
    (port,) = service["spec"]["ports"]
    (container,) = template["spec"]["containers"]
    # A name without an address of its own maps no ports.
    (listens,) = (one for one in container["ports"] if one["name"] == port["targetPort"])
    assert port["port"] == listens["containerPort"] == 8000
    assert "--port" not in container["args"][0], "vLLM's default is 8000"


def test_each_claim_names_the_volume_of_its_target() -> None:
    folder = EXAMPLES / "kubernetes" / "pvc"
    made = yaml.safe_load_all((folder / "volumes.yaml").read_text())
    paths = {
        one["metadata"]["name"]: one["spec"]["local"]["path"]
        for one in made
        if one["kind"] == "PersistentVolume"
    }
    (patch,) = yaml.safe_load((folder / "kustomization.yaml").read_text())["patches"]
    spec = yaml.safe_load(patch["patch"])["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    mounts = {one.get("name"): one["mountPath"] for one in container["volumeMounts"]}
    claims = {
        one["metadata"]["name"]: one["spec"]["volumeName"] for one in spec["volumeClaimTemplates"]
    }
    assert len({*claims.values()}) == len(paths) == 2
    for name, volume in claims.items():
        assert paths[volume] == mounts[name]


def test_probes_and_limits_fit_together(manifest: tuple[dict[str, Any], dict[str, Any]]) -> None:
    _, pod = manifest
    (container,) = pod["containers"]
    ports = {port["name"] for port in container["ports"]}
    startup, live = container["startupProbe"], container["livenessProbe"]
    for probe in (startup, live, container["readinessProbe"]):
        assert probe["httpGet"]["path"] == "/health"
        assert probe["httpGet"]["port"] in ports
    seconds = [one["periodSeconds"] * one["failureThreshold"] for one in (startup, live)]
    assert seconds[0] >= 600, "a large model loads for minutes"
    assert seconds[1] >= 30, "one slow answer must not kill a server"
    limits, requests = (container["resources"][name] for name in ("limits", "requests"))
    # No overcommitment: a pod that exceeds a node's memory is killed with its CPU tier.
    assert limits["memory"] == requests["memory"]
    (cache,) = (one for one in pod["volumes"] if one["name"] == "cache")
    room = parse_bytes(limits["ephemeral-storage"] + "B")
    assert parse_bytes(cache["emptyDir"]["sizeLimit"] + "B") < room
    assert room == parse_bytes(requests["ephemeral-storage"] + "B")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
@pytest.mark.parametrize("variant", ["hostpath", "pvc"])
def test_kubernetes_accepts_both_variants(variant: str, tmp_path: Path) -> None:
    built = tmp_path / "built.yaml"
    built.write_text(run("kubectl", "kustomize", EXAMPLES / "kubernetes" / variant))
    tool = [Path(sys.executable).with_name("uv"), "tool", "run", "--quiet", "--from", VALIDATOR]
    if subprocess.run([*tool, "kubernetes-validate", "--version"], capture_output=True).returncode:
        pytest.skip(f"{VALIDATOR} cannot be had here")
    run(*tool, "kubernetes-validate", "--strict", built)
    kinds = {one["kind"]: one for one in yaml.safe_load_all(built.read_text())}
    spec = kinds["StatefulSet"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert kinds["Service"]["metadata"]["name"] == spec["serviceName"]
    claims = {one["metadata"]["name"] for one in spec.get("volumeClaimTemplates", [])}
    volumes = {one["name"] for one in spec["template"]["spec"]["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes | claims
    mounted = {one["mountPath"] for one in container["volumeMounts"]}
    config = json.loads(kinds["ConfigMap"]["data"]["transfer.json"])["kv_connector_extra_config"]
    targets = set(config["targets"])
    assert bool(claims) == (variant == "pvc")
    assert targets <= mounted if claims else "/mnt/kv" in mounted
    broken = tmp_path / "broken.yaml"
    broken.write_text(built.read_text().replace("readinessProbe:", "readynessProbe:"))
    done = subprocess.run(
        [*tool, "kubernetes-validate", "--strict", broken], capture_output=True, text=True
    )
    assert done.returncode, "the check sees a key that Kubernetes does not have"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory of stubs, which stands first in PATH and logs their calls in its `calls`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def stub(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "{name} $*" >>"{folder}/calls"\n{script}\n')
    path.chmod(0o755)


def shell_line(text: str) -> str:
    """Return the shell's script in a unit's setting, with systemd's continued lines joined."""
    return shlex.split(text.replace("\\\n", " "))[2]


def unit_value(name: str, key: str) -> str:
    text = (EXAMPLES / "systemd" / name).read_text()
    found = re.search(rf"^{key}=((?:.*\\\n)*.*)$", text, re.MULTILINE)
    assert found
    return found[1]


def start(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    return subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("dead", "code"), [("", 0), ("10.0.0.1", 0), ("10.0.0.2", 0), (".*", 1)])
def test_a_dead_path_at_boot_leaves_the_others(programs: Path, dead: str, code: int) -> None:
    stub(programs, "nvme", f'! echo "$*" | grep -q -- "--traddr={dead} "' if dead else "exit 0")
    script = shell_line(unit_value("nvme-kv@.service", "ExecStart"))
    given = {"PATHS": "10.0.0.1 10.0.0.2", "TRANSPORT": "tcp", "NQN": "nqn.x"}
    done = start(f"set -u; {script}", programs, **given)
    assert done.returncode == code, done.stderr
    calls = (programs / "calls").read_text()
    assert re.findall(r"--traddr=(\S+)", calls) == ["10.0.0.1", "10.0.0.2"], "all paths are tried"
    named = re.findall(r"no path to nqn.x over (\S+)", done.stderr)
    assert named == [one for one in ("10.0.0.1", "10.0.0.2") if dead and re.fullmatch(dead, one)]


def start_lines() -> dict[str, str]:
    (container,) = next(
        one for one in yaml.safe_load_all(MANIFEST.read_text()) if one["kind"] == "StatefulSet"
    )["spec"]["template"]["spec"]["containers"]
    return {
        "systemd": shell_line(unit_value("vllm.service", "ExecStart")),
        "kubernetes": container["args"][0],
    }


@pytest.mark.parametrize("where", ["systemd", "kubernetes"])
@pytest.mark.parametrize(("code", "pool"), [(0, "2TiB"), (1, "2TiB"), (2, "0")])
def test_a_target_that_cannot_be_used_leaves_the_cpu_tier(
    programs: Path, where: str, code: int, pool: str
) -> None:
    stub(programs, "vllm-nvmeof", f"exit {code}")
    stub(programs, "vllm", f'echo "pool $VLLM_NVMEOF_POOL_BYTES" >>"{programs}/calls"')
    done = start(start_lines()[where], programs, VLLM_NVMEOF_POOL_BYTES="2TiB")
    assert done.returncode == 0, done.stderr
    doctor, served, found = (programs / "calls").read_text().splitlines()
    assert doctor.startswith("vllm-nvmeof doctor --target /mnt/kv/0 ")
    assert served.startswith("vllm serve MODEL --kv-offloading-backend nvmeof ")
    assert found == f"pool {pool}"
    assert ("no pool" in done.stdout + done.stderr) == (pool == "0")


@pytest.mark.parametrize(("code", "served"), [(0, True), (1, True), (2, False)])
def test_the_doctor_checks_the_pool_that_is_then_served(
    programs: Path, code: int, served: bool
) -> None:
    seen = f'echo "$VLLM_NVMEOF_TARGETS $VLLM_NVMEOF_POOL_BYTES" >>"{programs}/calls"'
    stub(programs, "vllm-nvmeof", f"{seen}; exit {code}")
    stub(programs, "vllm", seen)
    done = start(
        f"bash {EXAMPLES}/02_serve.sh MODEL", programs, TARGETS="/kv/0:/kv/1", POOL_BYTES="4TiB"
    )
    assert done.returncode == (0 if served else code), done.stderr
    calls = (programs / "calls").read_text().splitlines()
    assert calls[:2] == ["vllm-nvmeof doctor --staging 30GiB", "/kv/0:/kv/1 4TiB"]
    assert calls[3:] == (["/kv/0:/kv/1 4TiB"] if served else [])


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
    assert vllm["Unit"]["Wants"] == "mnt-kv-0.mount"
    assert "mnt-kv-0.mount" in vllm["Unit"]["After"]
    assert mount["Unit"]["Requires"] in mount["Install"]["WantedBy"].split()
    assert "noatime" in mount["Mount"]["Options"].split(",")
    where = mount["Mount"]["Where"]
    assert vllm["Service"]["ReadWritePaths"] == f"-{where}"
    text = (EXAMPLES / "systemd" / "vllm.service").read_text()
    assert f"VLLM_NVMEOF_TARGETS={where}\n" in text
    assert f"--target {where} " in text
    connect = (EXAMPLES / "systemd" / "nvme-kv@.service").read_text()
    assert "fast_io_fail_tmo=5" in connect


def test_the_container_copies_what_the_wheel_is_built_from(tmp_path: Path) -> None:
    text = (EXAMPLES / "container" / "Containerfile").read_text()
    copies = [line.split()[1:] for line in re.findall(r"^COPY [^-].*$", text, re.MULTILINE)]
    for *sources, place in copies:
        for source in sources:
            path, copy = ROOT / source, tmp_path / place
            if path.is_dir():
                # What is compiled here would not be in a checkout.
                ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.pyi")
                shutil.copytree(path, copy, ignore=ignored)
            else:
                shutil.copy(path, copy)
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "build", "--quiet", "--sdist", "--no-build-isolation", "--out-dir", tmp_path]
    run(*command, tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    built_from = run("git", "-C", ROOT, "ls-files", "bench/vllm_nvmeof_bench", "kernels",
                     "vllm_nvmeof_offload", "CMakeLists.txt", "LICENSE")  # fmt: skip
    assert set(built_from.split()) <= inside
    assert "tools/wheel.sh" in inside
    # The package's name is on no package index: an extra is given behind the wheel's file.
    assert '/*.whl)[cuda]"' in text
