# SPDX-License-Identifier: Apache-2.0
"""A wheel of this tree, and an environment that has this package only from the wheel.

The wheel's dependencies are installed from the index, at the versions of the lock. vLLM, torch and
their dependencies, 3 GB, are links to this checkout's environment. They are linked one by one, so
that this checkout (installed in place there) cannot be imported through them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

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
