# SPDX-License-Identifier: Apache-2.0
"""Copy this package into a vLLM source tree and register it where vLLM registers its own parts.

Usage: python tools/graft.py [--diff] VLLM_TREE

VLLM_TREE contains vLLM's package `vllm/` and, if it is a source tree, `setup.py`. The package is
copied to `vllm/v1/kv_offload/nvmeof/` with rewritten imports and with the compiled modules that are
installed for this Python. The lines of `EDITS` are added to vLLM's own files. If a file does not
contain an edit's text exactly once, the script names the file and changes nothing. A second run
updates the package and keeps the edits. `--diff` only prints the edits.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "vllm_nvmeof_offload"
IN_TREE = "vllm.v1.kv_offload.nvmeof"
PLACE = Path(*IN_TREE.split("."))
_COMPILED = ("_tiers", "_native")
_KERNELS = ("copy_blocks.cu", "crc_blocks.cu")
#: A fork needs no plugin, and only this repository's checks need the type stubs.
_LEFT_OUT = ("plugin.py", "*.pyi", "*.cpp", "*.h", "*.def", "*.so", "__pycache__")


class GraftError(Exception):
    """An unexpected tree or missing compiled modules; nothing was changed."""


@dataclass(frozen=True)
class Edit:
    """A change to one of vLLM's files: `lines` replace `anchor`, whole lines that occur once in
    `file`. With `only_source` the file exists only in a source tree, not in an installed vLLM."""

    file: str
    anchor: str
    lines: str
    only_source: bool = False

    def apply(self, text: str) -> str:
        """Return the text with the edit, unchanged if it already has the edit. Raises
        GraftError."""
        if self.lines in text:
            return text
        if text.count(self.anchor) != 1:
            found = "occurs more than once" if self.anchor in text else "is gone"
            raise GraftError(
                f"{self.file}: the text that an edit looks for {found}: "
                f"`{self.anchor.strip().splitlines()[0].strip()}`; tools/graft.py does not know "
                "this vLLM"
            )
        return text.replace(self.anchor, self.lines)


def _after(file: str, anchor: str, added: str, *, only_source: bool = False) -> Edit:
    return Edit(file, anchor, anchor + added, only_source)


def _before(file: str, anchor: str, added: str) -> Edit:
    return Edit(file, anchor, added + anchor)


_CACHE, _CONFIG = "vllm/config/cache.py", "vllm/config/vllm.py"
_TRANSFER, _ENGINE = "vllm/config/kv_transfer.py", "vllm/v1/engine/core.py"
#: The edits for vLLM 0.32 and 0.33.
EDITS = (
    Edit(
        _CACHE,
        'KVOffloadingBackend = Literal["native", "lmcache"]\n',
        'KVOffloadingBackend = Literal["native", "lmcache", "nvmeof"]\n',
    ),
    Edit(
        _CACHE,
        "    'native' (vLLM native CPU offloading), 'lmcache'.\n",
        "    'native' (vLLM native CPU offloading), 'lmcache', 'nvmeof' (pinned CPU memory\n"
        "    and a file pool on NVMe-over-Fabrics namespaces).\n",
    ),
    Edit(
        _TRANSFER,
        '    kv_load_failure_policy: Literal["recompute", "fail"] = "fail"\n',
        '    kv_load_failure_policy: Literal["recompute", "fail"] | None = None\n',
    ),
    Edit(
        _TRANSFER,
        '    \'fail\': immediately fail the request with an error finish reason (default)"""\n',
        "    'fail': immediately fail the request with an error finish reason\n"
        "    None: 'recompute' with the offloading backend 'nvmeof', otherwise 'fail'\"\"\"\n",
    ),
    _before(
        _CONFIG,
        "        # KV offloading is only activated when kv_offloading_size is set.\n",
        f"        from {IN_TREE}.vllm_adapter import configure\n\n"
        "        if configure.complete_if_ours(self):\n"
        "            return\n\n",
    ),
    _before(
        "vllm/distributed/kv_transfer/kv_connector/factory.py",
        'KVConnectorFactory.register_connector(\n    "OffloadingConnector",\n',
        "KVConnectorFactory.register_connector(\n"
        '    "NVMeoFOffloadingConnector",\n'
        f'    "{IN_TREE}.connector",\n'
        '    "NVMeoFOffloadingConnector",\n'
        ")\n\n",
    ),
    _after(
        "vllm/v1/kv_offload/factory.py",
        "# Register various specs here.\n",
        "OffloadingSpecFactory.register_spec(\n"
        '    "NVMeoFOffloadingSpec",\n'
        f'    "{IN_TREE}.spec",\n'
        '    "NVMeoFOffloadingSpec",\n'
        ")\n",
    ),
    _before(
        _ENGINE,
        "from vllm.v1.metrics.stats import SchedulerIterationDetails, SchedulerStats\n",
        f"from {IN_TREE}.vllm_adapter import new_weights\n",
    ),
    _before(
        _ENGINE,
        'class EngineCore:\n    """Inner loop of vLLM\'s Engine."""\n',
        "@new_weights.install\n",
    ),
    _after(
        "requirements/common.txt",
        "cbor2 # Required for cross-language serialization of hashable objects\n",
        "crc32c >= 2.7 # Required for the offloading backend nvmeof\n",
        only_source=True,
    ),
    _after(
        "setup.py",
        '        "libs/*.so*",\n',
        '        "v1/kv_offload/nvmeof/native/*.so",\n'
        '        "v1/kv_offload/nvmeof/copy/*.cu",\n'
        '        "v1/kv_offload/nvmeof/commands/size/*.json",\n',
        only_source=True,
    ),
)


def edited(tree: Path) -> dict[str, tuple[str, str]]:
    """Return, by file, the text before and after all edits. Raises GraftError if one fails."""
    if not (tree / "vllm" / "__init__.py").is_file():
        raise GraftError(f"{tree}: there is no vLLM: {tree / 'vllm/__init__.py'} is missing")
    is_source = (tree / "setup.py").is_file()
    texts: dict[str, tuple[str, str]] = {}
    for edit in EDITS:
        if edit.only_source and not is_source:
            continue
        try:
            before, after = texts.get(edit.file) or ((tree / edit.file).read_text(),) * 2
        except OSError as error:
            raise GraftError(f"{edit.file}: {error.strerror}") from error
        texts[edit.file] = (before, edit.apply(after))
    return texts


def diff(tree: Path) -> str:
    """Return this tree's edits in the format of `diff -u`."""
    out: list[str] = []
    for file, (before, after) in sorted(edited(tree).items()):
        lines = (before.splitlines(keepends=True), after.splitlines(keepends=True))
        out += difflib.unified_diff(*lines, f"a/{file}", f"b/{file}")
    return "".join(out)


def rewritten(text: str) -> str:
    """Return a module's text with the package's name in vLLM's tree."""
    return re.sub(rf"\b{PACKAGE}\b", IN_TREE, text)


def compiled_modules() -> list[Path]:
    """Return the compiled modules installed for this Python. Raises GraftError without them."""
    spec = importlib.util.find_spec(PACKAGE)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    found: dict[str, Path] = {}
    for name in _COMPILED:
        for path in (Path(place) / "native" / (name + suffix) for place in places):
            if path.is_file():
                found[name] = path
    missing = [name for name in _COMPILED if name not in found]
    if missing:
        raise GraftError(
            f"{sys.executable} has no compiled {', '.join(missing)}: install this package there "
            f"first (python -m pip install {ROOT}); the fork must run with the same Python"
        )
    return list(found.values())


def lay(package: Path) -> None:
    """Create the directory `package` from this repository's sources."""
    native = compiled_modules()
    shutil.copytree(ROOT / PACKAGE, package, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    for path in package.rglob("*.py"):
        path.write_text(rewritten(path.read_text()))
    for path in native:
        shutil.copy(path, package / "native")
    for name in _KERNELS:
        shutil.copy(ROOT / "kernels" / name, package / "copy")


def graft(tree: Path) -> None:
    """Copy the package into `tree` and edit vLLM's files. A GraftError changes nothing."""
    texts = edited(tree)
    place = tree / PLACE
    fresh = place.with_name(f".{place.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        lay(fresh)
        shutil.rmtree(place, ignore_errors=True)
        fresh.rename(place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    # The package is copied first, because vLLM with only the edits could not be imported.
    for file, (before, after) in texts.items():
        if after != before:
            _replace(tree / file, after)


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    shutil.copymode(path, fresh)
    os.replace(fresh, path)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="graft.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("tree", type=Path, metavar="VLLM_TREE", help="directory with vllm/")
    parser.add_argument("--diff", action="store_true", help="print the edits and change nothing")
    options = parser.parse_args(arguments)
    try:
        if options.diff:
            sys.stdout.write(diff(options.tree))
            return 0
        graft(options.tree)
    except GraftError as error:
        print(f"graft.sh: {error}", file=sys.stderr)
        return 1
    print(f"{options.tree / PLACE}: copied, with {len(compiled_modules())} compiled modules")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
