# SPDX-License-Identifier: Apache-2.0
"""Releases of vLLM: source distributions from the package index that this environment uses,
unpacked, and with this package in their tree as `tools/graft.sh` makes it. No part of a release
enters the repository."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fabric.rig.packages import locked

_ASK_TIMEOUT_S = 60
_READ_TIMEOUT_S = 60


class ReleaseUnavailableError(Exception):
    """A release cannot be had on this machine; the message has the reason."""


class ReleaseDamagedError(Exception):
    """A fetched file has another hash than the index states: the test fails and is not skipped."""


@dataclass(frozen=True)
class Sdist:
    """A source distribution on this machine."""

    version: str
    path: Path
    sha256: str


def cache_place() -> Path:
    """The directory that keeps releases, packed and unpacked (about 150 MB each)."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vllm-nvmeof" / "releases"


def newest(release: str = "") -> str:
    """The newest version that the index has, of a release (`0.33`) or of all.

    Raises: ReleaseUnavailableError: there is no index, or no such version.
    """
    return str(_resolve(f"vllm=={release}.*" if release else "vllm")["version"])


def ask_index(version: str) -> tuple[str, str]:
    """URL and SHA-256 of the file, from resolving only this requirement."""
    sdist = _resolve(f"vllm=={version}").get("sdist")
    if sdist is None or not str(sdist.get("url", "")).startswith("https://"):
        raise ReleaseUnavailableError(f"the index has no source distribution of vLLM {version}")
    return sdist["url"], sdist["hashes"]["sha256"]


def _resolve(requirement: str) -> dict[str, Any]:
    """The only package of the lock file that uv makes of a requirement."""
    uv = Path(sys.executable).with_name("uv")
    options = ["--no-deps", "--no-binary", "vllm", "--format", "pylock.toml", "--quiet"]
    with tempfile.TemporaryDirectory() as scratch:
        lock = Path(scratch) / "pylock.toml"
        try:
            done = subprocess.run(
                [uv, "pip", "compile", *options, "--output-file", lock, "-"],
                input=f"{requirement}\n",
                capture_output=True,
                text=True,
                timeout=_ASK_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ReleaseUnavailableError(f"uv does not work here: {error}") from error
        if done.returncode:
            raise ReleaseUnavailableError(f"no package index here: {' '.join(done.stderr.split())}")
        (package,) = tomllib.loads(lock.read_text())["packages"]
    return dict(package)


def fetch(version: str, ask: Callable[[str], tuple[str, str]] = ask_index) -> Sdist:
    """The source distribution of vLLM `version`; the caller holds the lock of `cache_place()`.

    Raises:
        ReleaseUnavailableError: there is no index, or it does not have this version.
        ReleaseDamagedError: the file has another hash than the index states.
    """
    name = f"vllm-{version}.tar.gz"
    packed = cache_place() / name
    record = packed.with_name(name + ".sha256")
    if packed.exists() and record.exists():
        known = record.read_text().strip()
        if _digest(packed) == known:
            return Sdist(version, packed, known)
    url, sha256 = ask(version)
    fresh = packed.with_name(name + ".part")
    try:
        with urllib.request.urlopen(url, timeout=_READ_TIMEOUT_S) as answer, fresh.open("wb") as to:
            while piece := answer.read(1 << 20):
                to.write(piece)
    except (OSError, urllib.error.URLError) as error:
        raise ReleaseUnavailableError(f"{name} cannot be fetched: {error}") from error
    found = _digest(fresh)
    if found != sha256:
        fresh.unlink()
        raise ReleaseDamagedError(f"{name} has SHA-256 {found}, the index states {sha256}")
    record.write_text(sha256 + "\n")
    os.replace(fresh, packed)
    return Sdist(version, packed, sha256)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_SUITE = "tests/v1/kv_connector/unit/"
#: Change it with the set of unpacked files or their form: the trees are then made again.
_EDITION = "1"
#: vLLM's tests name a model of a hub only for its shape; as a relative path it is this one.
_MODEL = "facebook/opt-125m"
_MODEL_SHAPE = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "torch_dtype": "float16",
}


@dataclass(frozen=True)
class Release:
    """suite: working directory of vLLM's tests. python: the first entry of PYTHONPATH to run this
    version; None for the installed version."""

    version: str
    suite: Path
    python: Path | None


def installed_version() -> str:
    """The version of the installed vLLM, without the name of its build."""
    return importlib.metadata.version("vllm").partition("+")[0]


def installed_package() -> Path:
    """The directory of the installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def release(version: str) -> Release:
    """Fetch and unpack a release unless that was done earlier.

    Raises:
        ReleaseUnavailableError: with the reason.
    """
    place = cache_place()
    with locked(place):
        sdist = fetch(version)
        tree = place / version
        stamp = tree / "stamp"
        edition = f"{_EDITION} {sdist.sha256}\n"
        if not stamp.exists() or stamp.read_text() != edition:
            shutil.rmtree(tree, ignore_errors=True)
            _unpack(sdist, tree)
            stamp.write_text(edition)
        _link_compiled(tree / "python" / "vllm")
    foreign = version != installed_version()
    return Release(version, tree / "suite", tree / "python" if foreign else None)


def _unpack(sdist: Sdist, tree: Path) -> None:
    suite, python = tree / "suite", tree / "python"
    for folder in (suite, python):
        folder.mkdir(parents=True)
    with opened(sdist.path) as archive:
        for member in archive:
            _, _, inside = member.name.partition("/")
            if inside.startswith(_SUITE):
                target = suite
            elif inside.startswith("vllm/"):
                target = python
            else:
                continue
            member.name = inside
            archive.extract(member, target)
    # Packages down to the suite, without vLLM's own conftest.py, which needs far more than it.
    for parent in ("tests", "tests/v1", "tests/v1/kv_connector"):
        (suite / parent / "__init__.py").touch()
    (suite / _MODEL).mkdir(parents=True)
    (suite / _MODEL / "config.json").write_text(json.dumps(_MODEL_SHAPE))
    # vLLM looks its own version up; a name that ends in +cpu selects the CPU.
    info = python / f"vllm-{sdist.version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {sdist.version}+cpu\n"
    )


def _link_compiled(package: Path) -> None:
    """Link the installed build's compiled files into `package` again: the build may have moved."""
    for compiled in installed_package().glob("*.so"):
        link = package / compiled.name
        if not link.exists() or link.readlink() != compiled:
            fresh = link.with_suffix(".new")
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(compiled)
            os.replace(fresh, link)


ROOT = Path(__file__).resolve().parents[2]
#: Of a source tree, beside the package.
_SOURCE = ("setup.py", "requirements/common.txt")


def source_tree(version: str, place: Path) -> Release:
    """A copy in `place` of a release's source as far as a graft edits it; made of links.

    Raises:
        ReleaseUnavailableError: with the reason.
    """
    suite = release(version).suite
    with locked(cache_place()):
        packed = fetch(version).path
        unpacked = cache_place() / version / "python"
        package = unpacked / "vllm" if version != installed_version() else installed_package()
        copy = functools.partial(shutil.copytree, copy_function=_link, symlinks=True)
        copy(package, place / "vllm")
        for info in unpacked.glob("*.dist-info"):
            copy(info, place / info.name)
    with opened(packed) as archive:
        for name in _SOURCE:
            member = archive.getmember(f"vllm-{version}/{name}")
            member.name = name
            archive.extract(member, place)
    return Release(version, suite, place)


def grafted(version: str, place: Path) -> Release:
    """The same with the package in it."""
    tree = source_tree(version, place)
    done = subprocess.run(
        [ROOT / "tools" / "graft.sh", place],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return tree


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def opened(path: Path) -> tarfile.TarFile:
    """An archive whose members stay below the place to which they are extracted. Python has the
    filter for that from 3.11.4 on."""
    archive = tarfile.open(path)  # noqa: SIM115
    archive.extraction_filter = getattr(tarfile, "data_filter", None)
    return archive
