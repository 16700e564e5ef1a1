# SPDX-License-Identifier: Apache-2.0
"""Unpacks a release's tests of the offloading connector, and its Python package.

The Python package runs over the compiled files of the installed CPU build, because package indexes
have no CPU build of the release, and the operators that tiny models need are the same.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.archives import opened
from tests.fabric.rig.packages import locked
from tests.upstream.releases import Sdist, cache_place, fetch

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
