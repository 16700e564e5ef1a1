# SPDX-License-Identifier: Apache-2.0
"""A release of vLLM with this package in its tree, as `tools/graft.sh` makes it.

Of the installed release the Python code is the CPU build's, which has two files of its own that an
engine without Triton needs; the files that a graft edits are the released ones.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.archives import opened
from tests.fabric.rig.packages import locked
from tests.upstream.releases import cache_place, fetch
from tests.upstream.trees import Release, installed_package, installed_version, release

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
