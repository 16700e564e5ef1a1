# SPDX-License-Identifier: Apache-2.0
"""The ratchets of the house rules: lengths, columns, layers, dead declarations, counts of files."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_nvmeof_offload"
BENCH = ROOT / "bench" / "vllm_nvmeof_bench"
CODE = (PACKAGE, BENCH, *(ROOT / name for name in ("tests", "tools", "examples", "research")))
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(path for folder in CODE for path in folder.rglob("*.py"))
NATIVE = sorted(
    path
    for folder in (PACKAGE, ROOT / "tests", ROOT / "kernels")
    for pattern in ("*.cpp", "*.h", "*.cu", "*.c")
    for path in folder.rglob(pattern)
)
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(
            page
            for name in ("docs", "examples", "research")
            for page in (ROOT / name).rglob("*.md")
        ),
    ]
)

FUNCTION_LINES_MAX = 70
COLUMNS_MAX = 100
#: Files and lines of Python and C++. They may fall (lower the number then), and a commit that
#: raises one gives the reason.
PRODUCT_FILES_MAX = 171
PRODUCT_LINES_MAX = 44_700
BENCH_FILES_MAX = 56
BENCH_LINES_MAX = 14_340
TESTS_FILES_MAX = 300
TESTS_LINES_MAX = 77_080
#: A count below its maximum by more than this share means that the maximum has to be lowered.
SLACK = 0.02

#: A file under so many lines that a single other one imports is a part of that one, unless it is
#: listed here with its reason.
SMALL_FILE_LINES = 100
SMALL_FILES: dict[str, str] = {
    "vllm_nvmeof_offload/manager/target_choice.py": "a newcomer looks for it by this name",
    "vllm_nvmeof_offload/vllm_adapter/tracing.py": "a newcomer looks for it by this name",
    "vllm_nvmeof_offload/commands/explain.py": "cli imports a command only when it is called",
}

#: Declarations that only tests use, or whose name something outside Python looks up.
USED_ELSEWHERE: dict[str, str] = {
    "_absolute": "pydantic calls this validator",
    "_have_addresses": "pydantic calls this validator",
    "_is_a_place": "pydantic calls this validator",
    "log_message": "http.server calls it",
    "_no_slip": "pydantic calls this validator",
    "_peers_have_a_pool_and_a_secret": "pydantic calls this validator",
    "_o_direct_for_groups": "pydantic calls this validator",
    "_one_chunk_size": "pydantic calls this validator",
}

#: Each package or module, from the lowest layer to the highest. Imports go down or sideways.
LAYERS: list[set[str]] = [
    {"errors", "units", "limits", "mounts", "child", "__init__"},
    {"protocol", "config", "groups", "metrics", "staging"},
    {"copy", "io", "pool", "fabric", "native"},
    {"targets", "follow", "peers"},
    {"manager", "worker"},
    {"exporter"},
    {"vllm_adapter", "spec", "connector", "multi_connector", "plugin"},
    {"commands"},
    {"cli"},
]
MAY_IMPORT_VLLM = {
    "plugin.py",
    "spec.py",
    "connector.py",
    "multi_connector.py",
    "vllm_adapter",
}
MAY_IMPORT_TORCH = {"copy", "worker", "vllm_adapter"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path, nodes: Iterator[ast.AST] | None = None) -> set[str]:
    """Every module that the file imports: anywhere in it, or in `nodes`."""
    found: set[str] = set()
    for node in nodes or ast.walk(ast.parse(path.read_text())):
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


def lines_of(folder: Path) -> Counter[str]:
    """Lines by file of Python and C++ below `folder`."""
    found: Counter[str] = Counter()
    for pattern in ("*.py", "*.cpp", "*.h", "*.c"):
        for path in folder.rglob(pattern):
            found[name_of(path)] = len(path.read_text().splitlines())
    return found


def longest_native_function(text: str) -> tuple[int, str]:
    """Lines and head of the longest function of a C++ text, found by its braces."""
    text = re.sub(r'//[^\n]*|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'', "", text)
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    longest, line, stack = (0, ""), 1, []
    parts = re.split(r"([{};])", text)
    for head, mark in zip(parts[::2], [*parts[1::2], ""], strict=True):
        line += head.count("\n")
        if mark == "{":
            starts = re.match(r"\s*(namespace|class|struct|enum|union|extern)\b", head)
            inside = any(is_function for _, is_function, _ in stack)
            stack.append((line, "(" in head and not starts and not inside, head.strip()))
        elif mark == "}" and stack:
            began, is_function, name = stack.pop()
            if is_function:
                longest = max(longest, (line - began + 1, name))
    return longest


def test_files_carry_the_licence() -> None:
    licence = "# SPDX-License-Identifier: Apache-2.0\n"
    assert [name_of(path) for path in SOURCES if not path.read_text().startswith(licence)] == []


def test_functions_are_short() -> None:
    long = [
        (name_of(path), node.name)
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    longest = {path: longest_native_function(path.read_text()) for path in NATIVE}
    long += [(name_of(at), head) for at, (n, head) in longest.items() if n > FUNCTION_LINES_MAX]
    assert long == []


def test_lines_are_narrow() -> None:
    """A row of a Markdown table, or what a checker reads behind a line, cannot be broken."""
    wide = []
    for path in [*SOURCES, *NATIVE, *DOCUMENTS]:
        for number, text in enumerate(path.read_text().splitlines(), start=1):
            is_row = path.suffix == ".md" and text.startswith("|")
            line = re.sub(r"  # (type: ignore|noqa|NOLINT).*", "", text)
            if len(line) > COLUMNS_MAX and not is_row:
                wide.append(f"{name_of(path)}:{number}")
    assert wide == []


def test_imports_run_downward() -> None:
    upward = [
        f"{name_of(path)} imports {module}"
        for path in MODULES
        for module in imports_of(path)
        if module.startswith("vllm_nvmeof_offload.") and is_above(path, module.split(".")[1])
    ]
    assert upward == []


def is_above(path: Path, part: str) -> bool:
    """Whether `part` of the package is in a higher layer than this module of it."""
    # `from vllm_nvmeof_offload import __version__` names no module.
    if not (PACKAGE / part).is_dir() and not (PACKAGE / f"{part}.py").exists():
        return False
    return layer_of(part) > layer_of(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))


def graph() -> dict[str, set[str]]:
    """The modules of product and benchmarks, and which of them each one imports anywhere."""
    modules = {}
    for top in (PACKAGE, BENCH):
        for path in top.rglob("*.py"):
            dotted = path.relative_to(top.parent).with_suffix("").as_posix().replace("/", ".")
            modules[dotted.removesuffix(".__init__")] = path
    return {name: imports_of(path) & set(modules) - {name} for name, path in modules.items()}


def circle_in(edges: dict[str, set[str]]) -> list[str]:
    """The first circle that is found, or nothing."""
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        done.add(name)
        return next((found for to in edges[name] if (found := walk(to, [*way, name]))), [])

    return next((found for name in edges if (found := walk(name, []))), [])


def test_imports_make_no_circle() -> None:
    assert not circle_in(graph())
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]


def test_vllm_and_torch_stay_at_the_edges() -> None:
    for path in MODULES:
        tops = {module.split(".")[0] for module in imports_of(path)}
        assert "vllm" not in tops or allowed(path, MAY_IMPORT_VLLM), name_of(path)
        assert "torch" not in tops or allowed(path, MAY_IMPORT_TORCH), name_of(path)


def test_small_files_with_one_importer_have_a_reason() -> None:
    importers: Counter[str] = Counter()
    for targets in graph().values():
        importers.update(targets)
    small = set()
    for path in MODULES:
        dotted = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        lines = len(path.read_text().splitlines())
        if path.name != "__init__.py" and lines < SMALL_FILE_LINES and importers[dotted] == 1:
            small.add(name_of(path))
    assert small == set(SMALL_FILES)


def declarations(path: Path) -> set[str]:
    """The names of functions, classes and constants of a module, and of its classes' methods."""
    found = set()
    for node in tree_of(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            decorated = any("command" in ast.dump(one) for one in node.decorator_list)
            found |= set() if decorated else {node.name}
        if isinstance(node, ast.ClassDef) and not any(is_vllms(base) for base in node.bases):
            found |= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    return {name for name in found if not (name.startswith("__") and name.endswith("__"))}


def is_vllms(base: ast.expr) -> bool:
    """Whether a class overrides methods that vLLM calls."""
    return isinstance(base, ast.Name) and ("Offloading" in base.id or "Connector" in base.id)


def words_of(path: Path) -> Counter[str]:
    """The names in a file's code, and in its strings other than `__all__` and docstrings."""
    found: Counter[str] = Counter()
    exported = {
        id(constant)
        for node in tree_of(path).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for constant in ast.walk(node.value)
    }
    for node in ast.walk(tree_of(path)):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in exported and " " not in node.value:
            found.update(re.findall(r"\w+", node.value))
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME:
            found[token.string] += 1
        elif token.type == tokenize.STRING and token.string[0] in "fF":
            found.update(re.findall(r"\w+", token.string))
    return found


def test_nothing_is_declared_and_never_used() -> None:
    """Once is the declaration itself; a use in tests only does not count."""
    words: Counter[str] = Counter()
    for path in SOURCES:
        if ROOT / "tests" not in path.parents:
            words.update(words_of(path))
    for path in [*(PACKAGE / "native").rglob("*.cpp"), ROOT / "pyproject.toml"]:
        words.update(re.findall(r"\w+", path.read_text()))
    declared: Counter[str] = Counter()
    for path in [*PACKAGE.rglob("*.py"), *BENCH.rglob("*.py")]:
        declared.update(declarations(path))
    dead = {name for name, times in declared.items() if words[name] <= times}
    assert dead == set(USED_ELSEWHERE)


@pytest.mark.parametrize(
    ("folder", "files_max", "lines_max"),
    [
        (PACKAGE, PRODUCT_FILES_MAX, PRODUCT_LINES_MAX),
        (BENCH, BENCH_FILES_MAX, BENCH_LINES_MAX),
        (ROOT / "tests", TESTS_FILES_MAX, TESTS_LINES_MAX),
    ],
    ids=["product", "bench", "tests"],
)
def test_files_and_lines_only_become_fewer(folder: Path, files_max: int, lines_max: int) -> None:
    lines = lines_of(folder)
    assert len(lines) <= files_max
    assert lines.total() <= lines_max
    assert len(lines) >= files_max * (1 - SLACK) - 1, "lower the maximum of files"
    assert lines.total() >= lines_max * (1 - SLACK), "lower the maximum of lines"


def test_the_rules_detect_what_they_forbid(tmp_path: Path) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text("def f():\n    import torch\n    from vllm.config import VllmConfig\n")
    assert {"torch", "vllm.config"} <= imports_of(probe)
    assert is_above(PACKAGE / "units.py", "pool") and not is_above(PACKAGE / "units.py", "limits")
    assert not is_above(PACKAGE / "units.py", "__version__")
    assert not allowed(PACKAGE / "pool" / "pool.py", MAY_IMPORT_VLLM)
    probe.write_text('__all__ = ["dead"]\nLIVE = 1\n\n\ndef dead() -> int:\n    return LIVE\n')
    assert declarations(probe) == {"LIVE", "dead"}
    assert words_of(probe)["dead"] == 1
    assert words_of(probe)["LIVE"] == 2
    text = "namespace a {\nint f(int b) {\n  if (b) {\n  }\n  return 1;\n}\n}\n"
    assert longest_native_function(text) == (5, "int f(int b)")


def test_no_package_of_tests_shares_a_name_with_another() -> None:
    """pytest imports them by their own name: one called `copy` would shadow Python's."""
    names = [place.parent.name for place in (ROOT / "tests").rglob("__init__.py")]
    assert set(names).isdisjoint(sys.stdlib_module_names)
    assert len(set(names)) == len(names)
