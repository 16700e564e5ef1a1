# SPDX-License-Identifier: Apache-2.0
"""Source distributions of vLLM, from the package index that this environment uses.

uv reports the file's URL in the index and its SHA-256; it reads the same settings and variables as
for any installation. Fetched files stay in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
