# SPDX-License-Identifier: Apache-2.0
"""The examples that need no vLLM run, with the router before made-up servers; scripts and manifests
match their texts."""

from __future__ import annotations

import asyncio
import configparser
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

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
def manifest() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text())}


@pytest.fixture(scope="module")
def pod(manifest: dict[str, Any]) -> Any:
    return manifest["StatefulSet"]["spec"]["template"]["spec"]


def test_the_manifests_configuration_is_the_products(manifest: dict[str, Any], pod: Any) -> None:
    transfer = json.loads(manifest["ConfigMap"]["data"]["transfer.json"])
    extra = transfer["kv_connector_extra_config"]
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


def test_the_manifest_matches_its_readme(pod: Any) -> None:
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


def test_the_service_leads_to_the_servers_port(manifest: dict[str, Any]) -> None:
    service, server = manifest["Service"], manifest["StatefulSet"]
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


def test_probes_and_limits_fit_together(pod: Any) -> None:
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


@pytest.fixture
def start_lines(pod: Any) -> dict[str, str]:
    (container,) = pod["containers"]
    return {
        "systemd": shell_line(unit_value("vllm.service", "ExecStart")),
        "kubernetes": container["args"][0],
    }


@pytest.mark.parametrize("where", ["systemd", "kubernetes"])
@pytest.mark.parametrize(("code", "pool"), [(0, "2TiB"), (1, "2TiB"), (2, "0")])
def test_a_target_that_cannot_be_used_leaves_the_cpu_tier(
    programs: Path, start_lines: dict[str, str], where: str, code: int, pool: str
) -> None:
    stub(programs, "vllm-nvmeof", f"exit {code}")
    stub(programs, "vllm", f'echo "pool $VLLM_NVMEOF_POOL_BYTES" >>"{programs}/calls"')
    done = start(start_lines[where], programs, VLLM_NVMEOF_POOL_BYTES="2TiB")
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


# The router example before small made-up servers in this process; none of them has a model.


PATH = Path(__file__).parents[3] / "examples" / "dual_path_router.py"
PROMPT = {"model": "m", "prompt": list(range(100)), "max_tokens": 10}


def loaded() -> ModuleType:
    sys.path.insert(0, str(PATH.parent))  # as for a script
    specification = importlib.util.spec_from_file_location("dual_path_router", PATH)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["dual_path_router"] = module
    specification.loader.exec_module(module)
    return module


example = loaded()


class FakeServer:
    """Answers after its gate is open. queue_s: its gauge, which it exports unless it is None."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue_s: float | None = None
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Event()
        routes = [
            Route("/metrics", self._metrics),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _metrics(self, _: Request) -> Response:
        if self.queue_s is None:
            return PlainTextResponse("vllm:other 1.0\n")
        lanes = {"0": self.queue_s / 2, "1": self.queue_s, "peer c:7300": 99.0}
        lines = (
            f'vllm:nvmeof_read_queue_seconds{{engine="0",lane="{lane}"}} {value}\n'
            for lane, value in lanes.items()
        )
        return PlainTextResponse("".join(lines))

    async def _complete(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.arrived.set()
        await self.gate.wait()
        transfer = {"remote_engine_id": self.name}
        return JSONResponse({"server": self.name, "kv_transfer_params": transfer}, self.status)


class Rig:
    """A router over two prefill and two decode servers. A server whose host is not known cannot be
    reached."""

    def __init__(self, decode: bool = True, **limits: int) -> None:
        self.servers = {name: FakeServer(name) for name in ("p0", "p1", "d0", "d1")}
        self.lost: set[str] = set()
        first = [f"http://{name}" + ("" if decode else f",{name}:7300") for name in ("p0", "p1")]
        second = [f"http://{name},{name}:7300" for name in ("d0", "d1")] if decode else []
        engines = [list(map(example.Engine.of, texts)) for texts in (first, second)]
        client = httpx.AsyncClient(transport=httpx.MockTransport(self._pass))
        self.router = example.Router(*engines, client, example.Limits(**limits))
        transport = httpx.ASGITransport(example.application(self.router))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://router")

    async def _pass(self, request: httpx.Request) -> httpx.Response:
        if request.url.host in self.lost:
            raise httpx.ConnectError("refused")
        transport = httpx.ASGITransport(self.servers[request.url.host].app)
        return await transport.handle_async_request(request)

    async def ask(self, **more: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json=PROMPT | more)

    async def scrape(self) -> None:
        for engine in self.engines():
            await self.router.scrape(engine)

    def engines(self) -> list[Any]:
        return [*self.router.prefill, *self.router.decode]

    def held(self) -> list[tuple[int, int]]:
        return [(one.tokens, one.requests) for one in self.engines()]

    def asked(self) -> dict[str, int]:
        return {name: len(server.bodies) for name, server in self.servers.items()}


def play(scenario: Callable[[Rig], Awaitable[None]], decode: bool = True, **limits: int) -> None:
    async def whole() -> None:
        await asyncio.wait_for(scenario(Rig(decode, **limits)), timeout=20)

    asyncio.run(whole())


def test_a_prompt_is_computed_on_one_server_and_answered_by_another_one() -> None:
    async def scenario(rig: Rig) -> None:
        answer = await rig.ask(stream_options={"include_usage": True})
        assert answer.json()["server"] == "d0"
        prompt, passed = rig.servers["p0"].bodies[0], rig.servers["d0"].bodies[0]
        assert (prompt["max_tokens"], prompt["stream"]) == (1, False)
        assert "stream_options" not in prompt
        assert prompt["kv_transfer_params"]["do_remote_decode"] is True
        assert prompt["kv_transfer_params"]["nvmeof"] == {"helpers": ["d0:7300", "d1:7300"]}
        assert passed["max_tokens"] == 10
        assert passed["kv_transfer_params"] == {"remote_engine_id": "p0"}
        assert rig.held() == [(0, 0)] * 4

    play(scenario)


def test_prompts_avoid_tokens_and_long_queues_and_helpers_come_by_their_queues() -> None:
    async def scenario(rig: Rig) -> None:
        servers = rig.servers
        servers["p0"].queue_s, servers["p1"].queue_s, servers["d0"].queue_s = 0.5, 0.01, 0.2
        await rig.scrape()
        assert [one.queue_s for one in rig.engines()] == [0.5, 0.01, 0.2, 0.0]
        servers["p1"].gate.clear()
        first = asyncio.create_task(rig.ask())
        await servers["p1"].arrived.wait()
        assert rig.held() == [(0, 0), (100, 1), (110, 1), (0, 0)]
        servers["p0"].queue_s = 0.02  # now its link is short too, and it has no tokens
        await rig.scrape()
        second = await rig.ask()
        assert second.json()["server"] == "d1"
        hint = servers["p0"].bodies[0]["kv_transfer_params"]["nvmeof"]
        assert hint == {"helpers": ["d1:7300", "d0:7300"]}
        servers["p1"].gate.set()
        await first
        assert rig.held() == [(0, 0)] * 4

    play(scenario)


def test_without_gauges_the_routers_own_counts_decide() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.scrape()
        for server in rig.servers.values():
            server.gate.clear()
        tasks = []
        for name in ("p0", "p1"):
            tasks.append(asyncio.create_task(rig.ask()))
            await rig.servers[name].arrived.wait()
        assert rig.asked() == {"p0": 1, "p1": 1, "d0": 0, "d1": 0}
        for server in rig.servers.values():
            server.gate.set()
        assert {(await task).json()["server"] for task in tasks} == {"d0", "d1"}

    play(scenario)


def test_without_decode_servers_the_one_that_computes_answers_and_others_may_read() -> None:
    async def scenario(rig: Rig) -> None:
        server = rig.servers["p0"]
        server.gate.clear()
        first = asyncio.create_task(rig.ask(stream_options={"include_usage": True}))
        await server.arrived.wait()
        assert rig.held() == [(100, 1), (0, 0)]
        assert (await rig.ask()).json()["server"] == "p1", "the first still counts"
        server.gate.set()
        assert (await first).json()["server"] == "p0"
        assert rig.held() == [(0, 0)] * 2
        (body,) = server.bodies
        assert body["max_tokens"] == 10
        assert "stream_options" in body
        assert body["kv_transfer_params"] == {"nvmeof": {"helpers": ["p1:7300"]}}
        rig.lost = {"p1"}
        await rig.scrape()
        await rig.ask()
        assert "kv_transfer_params" not in server.bodies[1], "nobody else reads"

    play(scenario, decode=False)


def test_a_server_that_is_gone_gets_nothing_until_it_answers_again() -> None:
    async def scenario(rig: Rig) -> None:
        rig.lost = {"p0"}
        assert (await rig.ask()).status_code == 502
        assert rig.held() == [(0, 0)] * 4
        assert (await rig.ask()).json()["server"] == "d0"
        assert rig.asked()["p1"] == 1
        rig.lost = {"p0", "d0", "d1"}
        await rig.scrape()
        refused = await rig.ask()
        assert refused.status_code == 503
        assert "no decode server answers" in refused.text
        rig.lost = set()
        await rig.scrape()
        assert (await rig.ask()).status_code == 200
        assert rig.asked()["p0"] == 1

    play(scenario)


def test_an_error_of_the_prefill_server_is_passed_on_and_nothing_stays_counted() -> None:
    async def scenario(rig: Rig) -> None:
        rig.servers["p0"].status = 400
        answer = await rig.ask()
        assert (answer.status_code, answer.json()["server"]) == (400, "p0")
        assert rig.asked()["d0"] == 0
        assert rig.held() == [(0, 0)] * 4
        bad = await rig.client.post("/v1/completions", content=b"{")
        assert bad.status_code == 400

    play(scenario)


def test_requests_wait_for_room_in_their_order_and_too_many_are_refused() -> None:
    async def scenario(rig: Rig) -> None:
        rig.lost = {"d1"}
        await rig.scrape()
        decode = rig.servers["d0"]
        decode.gate.clear()
        first = asyncio.create_task(rig.ask(user="first"))
        await decode.arrived.wait()  # 110 of 150 tokens are held
        later = []
        for user in ("second", "third"):
            later.append(asyncio.create_task(rig.ask(user=user)))
            while rig.router.waiting < len(later):
                await asyncio.sleep(0)
        refused = await rig.ask()
        assert refused.status_code == 503
        assert "too many" in refused.text
        decode.gate.set()
        for task in (first, *later):
            assert (await task).status_code == 200
        assert [body["user"] for body in decode.bodies] == ["first", "second", "third"]
        assert rig.held() == [(0, 0)] * 4

    play(scenario, decode_tokens_max=150, waiting_max=2)


def test_a_client_that_leaves_gives_its_room_back() -> None:
    async def scenario(rig: Rig) -> None:
        for name in ("p0", "d0"):
            server = rig.servers[name]
            server.gate.clear()
            server.arrived.clear()
            task = asyncio.create_task(rig.ask())
            await server.arrived.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert rig.held() == [(0, 0)] * 4
            server.gate.set()

    play(scenario)


def test_tokens_are_counted_or_estimated() -> None:
    assert example.prompt_tokens({"prompt": [1, 2, 3]}) == 3
    assert example.prompt_tokens({"prompt": "x" * 400}) == 100
    messages = [{"role": "user", "content": "x" * 4000}]
    assert 1000 <= example.prompt_tokens({"messages": messages}) < 1020
    assert example.answer_tokens({"max_completion_tokens": 7, "max_tokens": 9}) == 7
    assert example.answer_tokens({}) == example.ANSWER_TOKENS
    asked = example.for_prefill({"max_completion_tokens": 7}, {"nvmeof": {}})
    assert asked["max_completion_tokens"] == 1
    json.dumps(asked)
