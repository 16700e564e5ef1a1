# SPDX-License-Identifier: Apache-2.0
"""The fields of vLLM's configuration classes, by release: `config_fields.json`.

    python -m tests.upstream.config_fields [VERSION …]

prints them for the newest version of each known release, or of those that are named, by reading
the releases' sources. Classes are those that `vllm.config` makes dataclasses of.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from tests.upstream.releases import installed_package, installed_version, newest, release
from vllm_nvmeof_offload.vllm_adapter import vllm_release

DATA = Path(__file__).with_suffix(".json")
_NO_FIELDS = ("ClassVar", "InitVar")

#: Class → its fields, separated by spaces.
Fields = dict[str, str]


def read_fields(package: Path) -> Fields:
    """Read the sources of a release. package: its directory `vllm`."""
    found: Fields = {}
    for path in sorted((package / "config").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and _is_dataclass(node):
                found[node.name] = " ".join(
                    line.target.id
                    for line in node.body
                    if isinstance(line, ast.AnnAssign)
                    and isinstance(line.target, ast.Name)
                    and not ast.unparse(line.annotation).startswith(_NO_FIELDS)
                )
    return found


def _is_dataclass(node: ast.ClassDef) -> bool:
    names = {ast.unparse(one).partition("(")[0] for one in node.decorator_list}
    return bool(names & {"config", "dataclass"})


def _package(version: str) -> Path:
    python = release(version).python if version != installed_version() else None
    return python / "vllm" if python is not None else installed_package()


if __name__ == "__main__":
    versions = sys.argv[1:] or [newest(one) for one in vllm_release.KNOWN]
    print(json.dumps({one: read_fields(_package(one)) for one in versions}, indent=1))
