# SPDX-License-Identifier: Apache-2.0
"""The wheel: its content, its use without vLLM, and a server installed only from it. Its
dependencies are installed from the index, at the versions of the lock. vLLM, torch and their
dependencies, 3 GB, are links to this checkout's environment. They are linked one by one, so that
this checkout (installed in place there) cannot be imported through them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from vllm_nvmeof_bench.servers.server import Server, ServerSpec

from tests.e2e import servers as rig
from vllm_nvmeof_offload import __version__
from vllm_nvmeof_offload.units import GIB

PROMPTS = 5  # the CPU tier holds less than three
#: The example's policy, which writes a line per victim.
POLICY = """
import importlib, os
SecondChance = importlib.import_module("04_custom_policy").SecondChance

class Logged(SecondChance):
    def victim(self):
        slot = super().victim()
        with open(os.environ["VICTIMS_FILE"], "a") as file:
            file.write(f"{slot}\\n")
        return slot
"""
WITHOUT_VLLM = """
import json
from vllm_nvmeof_offload.native import core
from vllm_nvmeof_offload.copy.driver import kernel_source
import vllm_nvmeof_offload, vllm_nvmeof_bench
print(json.dumps([len(kernel_source()), core.__file__, vllm_nvmeof_offload.__file__,
                  vllm_nvmeof_bench.__file__]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    scratch = tmp_path_factory.mktemp("wheel")
    wheel, sdist = build_wheel(scratch / "dist")
    assert sdist.name == f"vllm_nvmeof_offload-{__version__}.tar.gz"
    return install(wheel, scratch / "environment")


def test_the_wheel_is_complete_and_runs_without_vllm(installed: Environment) -> None:
    name = installed.wheel.name
    assert name.startswith(f"vllm_nvmeof_offload-{__version__}-cp3")
    assert "-manylinux_2_" in name
    inside = zipfile.ZipFile(installed.wheel).namelist()
    assert {
        "vllm_nvmeof_offload/py.typed",
        "vllm_nvmeof_offload/copy/copy_blocks.cu",
        "vllm_nvmeof_offload/copy/crc_blocks.cu",
    } <= {*inside}
    assert any(file.startswith("vllm_nvmeof_offload.libs/libisal") for file in inside)
    notices = {Path(file).stem for file in inside if re.search(r"/native/notices/.", file)}
    if Path("/etc/debian_version").exists():  # other distributions keep them in other directories
        assert notices == {"gcc", "libisal", "liburing", "nanobind"}
    assert not [file for file in inside if file.endswith((".cpp", ".h")) or "tests/" in file]

    assert f"{__version__} (vllm not installed)" in installed.run("vllm-nvmeof", "version")
    kernel, *places = json.loads(installed.run("python", "-c", WITHOUT_VLLM))
    assert kernel > 1000
    assert all(Path(place).is_relative_to(installed.prefix) for place in places)
    (metadata,) = installed.site_packages.glob("vllm_nvmeof_offload-*.dist-info/METADATA")
    for extra in ("bench", "cpu", "cuda"):
        assert f"Provides-Extra: {extra}\n" in metadata.read_text()
    disk = installed.prefix / "disk"
    few = ("--rounds", 1, "--blocks", "2MiB", "--arms", "ours", "--bytes-per-round", "16MiB")
    figures = installed.run(
        "vllm-nvmeof", "bench", "pool", *few, "--no-targets", "--dir", disk, "--json", "pool.json"
    )
    assert "2 MiB" in figures or "2.0 MiB" in figures


@dataclass(frozen=True)
class ByExample(ServerSpec):
    """A server started by `examples/02_serve.sh` in the wheel's environment."""

    def command(self, port: int) -> list[str]:
        script = str(ROOT / "examples" / "02_serve.sh")
        return ["/bin/bash", script, *super().command(port)[2:]]

    def environment(self) -> dict[str, str]:
        env = super().environment()
        env.pop("PYTHONPATH", None)
        return env | dict(self.env)


def test_a_server_from_the_wheel_by_the_examples_script_and_policy(
    installed: Environment, tmp_path: Path
) -> None:
    link_vllm(installed)
    shutil.copy(ROOT / "examples" / "04_custom_policy.py", tmp_path)
    (tmp_path / "logged_policy.py").write_text(POLICY)
    victims, plain = tmp_path / "victims", rig.spec()
    env = installed.variables(
        TARGETS=str(tmp_path / "pool"),
        STAGING_GIB=f"{rig.STAGING_SLOTS * rig.SLOT_BYTES / GIB:.6f}",
        POOL_BYTES=str(rig.POOL_SLOTS * rig.SLOT_BYTES),
        VLLM_NVMEOF_CHUNK_BYTES_MIN=str(rig.SHAPE.kv_bytes_per_token * rig.CHUNK_TOKENS),
        VLLM_NVMEOF_EVICTION_POLICY="logged_policy:Logged",
        VLLM_NVMEOF_ADMISSION="always",
        VICTIMS_FILE=str(victims),
        PYTHONPATH=str(tmp_path),
        VLLM_CPU_NUM_OF_RESERVED_CPU="1",
    )
    spec = ByExample(plain.model, plain.max_model_len, plain.gpu_blocks, plain.block_size, env=env)
    asked = rig.prompts()[:PROMPTS]
    with Server(spec, rig.BUILD / "logs" / "wheel.log").wait_ready() as server:
        cold = rig.ask(server, asked)
        back = rig.ask(server, asked)
        assert rig.same(back, cold)
        now = rig.metrics(server)
        assert now.value("vllm:nvmeof_loaded_tokens_total", source="pool") > 0
        assert now.value("vllm:nvmeof_fallbacks") == 0
    assert victims.read_text().split(), "the user's policy chose no victim"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_each_wheel_runs_in_its_python_without_vllm(tmp_path: Path) -> None:
    """`make wheel` as a user runs it: a wheel for each Python that is here."""
    dist = tmp_path / "dist"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONS"}
    command = ["bash", "tools/wheel.sh", sys.prefix, str(dist)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    wheels = sorted(dist.glob("*.whl"))
    assert done.stdout.count(".whl\n") == len(wheels) >= 1
    for wheel in wheels:
        (version,) = re.findall(r"-cp3(\d+)-cp3\d+-", wheel.name)
        prefix = tmp_path / version
        python = f"3.{version}"
        for words in (
            ["venv", "--quiet", "--python", python, prefix],
            ["pip", "install", "--quiet", "--python", prefix / "bin" / "python", wheel],
        ):
            subprocess.run([UV, *words], check=True, timeout=600)
        made = Environment(prefix, wheel)
        example = ROOT / "examples" / "01_roundtrip.py"
        assert "every byte is correct" in made.run("python", example, tmp_path / f"pool-{version}")
        assert "vllm not installed" in made.run("vllm-nvmeof", "version")
        assert made.run("python", "-V").startswith(f"Python {python}.")


@pytest.mark.soak
def test_the_demo_from_the_wheel(installed: Environment) -> None:
    link_vllm(installed)
    printed = installed.run("vllm-nvmeof", "demo", timeout_s=900)
    assert "identical" in printed


ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")


@dataclass(frozen=True)
class Environment:
    """A virtual environment made from `wheel`."""

    prefix: Path
    wheel: Path

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.prefix / "lib" / version / "site-packages"

    def run(self, *command: object, timeout_s: float = 60, **env: str) -> str:
        """Run a program of this environment, which must succeed; return its output."""
        words = [str(word) for word in command]
        done = subprocess.run(
            [str(self.prefix / "bin" / words[0]), *words[1:]],
            cwd=self.prefix,
            env=self.variables(**env),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def variables(self, **more: str) -> dict[str, str]:
        """The variables of the activated environment; none leads back to the checkout."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM_NVMEOF"))}
        env["PATH"] = f"{self.prefix / 'bin'}:{os.environ['PATH']}"
        return {**env, "VIRTUAL_ENV": str(self.prefix), "PYTHONNOUSERSITE": "1", **more}


def build_wheel(directory: Path) -> tuple[Path, Path]:
    """`make wheel` for this Python, into `directory`. Returns the wheel and the sdist."""
    command = ["bash", "tools/wheel.sh", str(Path(sys.prefix)), str(directory)]
    env = {**os.environ, "PYTHONS": sys.executable}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,) = directory.glob("*.whl")
    (sdist,) = directory.glob("*.tar.gz")
    return wheel, sdist


def install(wheel: Path, prefix: Path) -> Environment:
    """An empty environment with the wheel and its dependencies; no vLLM."""
    made = Environment(prefix, wheel)
    _uv("venv", "--python", sys.executable, prefix)
    lock = ROOT / "requirements" / "cpu.lock"
    _uv("pip", "install", "--python", made.python, "--constraint", lock, wheel)
    return made


def link_vllm(environment: Environment) -> None:
    """Link this checkout's vLLM and all its dependencies into the environment."""
    here = Path(sysconfig.get_path("purelib"))
    for path in here.iterdir():
        place = environment.site_packages / path.name
        if "vllm_nvmeof" not in path.name and not place.exists():
            place.symlink_to(path)
    # Written, not linked: the script's first line names the checkout's interpreter.
    command = environment.prefix / "bin" / "vllm"
    command.write_text(
        f"#!{environment.python}\nfrom vllm.entrypoints.cli.main import main\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    command.chmod(0o755)


def _uv(*arguments: object) -> None:
    command = [str(UV), "--quiet", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}: {done.stderr[-3000:]}"
