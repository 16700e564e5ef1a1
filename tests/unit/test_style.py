# SPDX-License-Identifier: Apache-2.0
"""The ratchet of the house rules: sizes of files and functions, and which way imports run."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_nvmeof_offload"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(
    path
    for folder in (PACKAGE, ROOT / "bench", ROOT / "tests", ROOT / "tools")
    for path in folder.rglob("*.py")
)

FUNCTION_LINES_MAX = 70
#: Each package or module, from the lowest layer to the highest. Imports go down or sideways.
LAYERS: list[set[str]] = [
    {"errors", "units", "names", "__init__"},
    {"protocol", "config", "metrics", "staging"},
    {"copy", "io", "pool", "fabric", "native"},
    {"targets"},
    {"manager", "worker"},
    {"vllm_adapter", "spec", "connector", "plugin"},
    {"commands"},
    {"cli"},
]
MAY_IMPORT_VLLM = {"plugin.py", "spec.py", "connector.py", "vllm_adapter"}
MAY_IMPORT_TORCH = {"copy", "worker", "vllm_adapter"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> set[str]:
    """Every module that the file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: imports are absolute here"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer_of(part: str) -> int:
    for number, parts in enumerate(LAYERS):
        if part in parts:
            return number
    raise AssertionError(f"{part} has no layer: put it into LAYERS")


def allowed(path: Path, places: set[str]) -> bool:
    inside = path.relative_to(PACKAGE)
    return inside.as_posix() in places or inside.parts[0] in places


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_are_short_and_files_carry_the_licence(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), "the SPDX line comes first"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{node.name}: {lines} lines"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_run_downward(path: Path) -> None:
    own = layer_of(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
    for module in imports_of(path):
        parts = module.split(".")
        # `from vllm_nvmeof_offload import __version__` names no module.
        is_module = len(parts) > 1 and (
            (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").exists()
        )
        if parts[0] == "vllm_nvmeof_offload" and is_module:
            assert layer_of(parts[1]) <= own, f"{name_of(path)} imports {module} above it"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_vllm_and_torch_stay_at_the_edges(path: Path) -> None:
    tops = {module.split(".")[0] for module in imports_of(path)}
    assert "vllm" not in tops or allowed(path, MAY_IMPORT_VLLM)
    assert "torch" not in tops or allowed(path, MAY_IMPORT_TORCH)


def test_the_rules_see_what_they_forbid(tmp_path: Path) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text("def f():\n    import torch\n    from vllm.config import VllmConfig\n")
    assert {"torch", "vllm.config"} <= imports_of(probe)
    assert layer_of("pool") > layer_of("units")
    assert not allowed(PACKAGE / "pool" / "pool.py", MAY_IMPORT_VLLM)


def test_no_package_of_tests_has_a_name_that_others_have() -> None:
    """pytest imports them by their own name: one called `copy` would stand before Python's."""
    names = [place.parent.name for place in (ROOT / "tests").rglob("__init__.py")]
    assert set(names).isdisjoint(sys.stdlib_module_names)
    assert len(set(names)) == len(names)
