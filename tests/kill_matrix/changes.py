# SPDX-License-Identifier: Apache-2.0
"""Mutants made by a rule: one operator, line or outcome of a module is changed.

Imported before anything of the package is, by `site/sitecustomize.py`: the standard library only.
"""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_nvmeof_offload"
FOLDERS = ("manager", "pool", "follow", "peers", "worker", "io", "vllm_adapter")
#: Enumerations whose members say how something ended, or what it is.
OUTCOMES = {"OutcomeKind", "Scope", "State", "Source", "Verdict", "OpKind", "Kind", "Reason"}
_COMPARED = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_JOINED = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
_ADDED = {ast.Add: ("+", "-"), ast.Sub: ("-", "+")}


@dataclass(frozen=True)
class Change:
    """Bytes `start` to `end` of the file `path`, relative to the package, become `after`."""

    path: str
    line: int
    last_line: int
    start: int
    end: int
    kind: str
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.start}:{self.kind}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def chosen(count: int, seed: int = 45) -> list[Change]:
    """So many changes of each folder, the kinds in turn. The same seed and tree give the same."""
    made: list[Change] = []
    for folder in FOLDERS:
        dice = random.Random(f"{seed} {folder}")
        by_kind: dict[str, list[Change]] = defaultdict(list)
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            for change in changes_of(path):
                by_kind[change.kind].append(change)
        for found in by_kind.values():
            dice.shuffle(found)
        kinds = sorted(by_kind)
        taken: list[Change] = []
        while len(taken) < count and any(by_kind.values()):
            for kind in kinds:
                if by_kind[kind] and len(taken) < count:
                    taken.append(by_kind[kind].pop())
        made += taken
    return made


def named(name: str) -> Change:
    """The change of this name. LookupError: the file has changed since."""
    path = PACKAGE / name.partition(":")[0]
    for change in changes_of(path):
        if change.name == name:
            return change
    raise LookupError(f"{name}: {path} has changed since; run the matrix again")


def changes_of(path: Path) -> Iterator[Change]:
    source = _Source(path)
    for node in _walk(ast.parse(source.text)):
        yield from source.changes(node)


class _Source:
    """A file, whose bytes are found by line and column."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_bytes()
        self._path = str(path.relative_to(PACKAGE))
        self._starts = [0]
        for line in self.text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def changes(self, node: ast.AST) -> Iterator[Change]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            words = _COMPARED[type(node.ops[0])]
            yield self._between(node.left, node.comparators[0], words, "comparison")
        elif isinstance(node, ast.BoolOp):
            yield self._between(*node.values[:2], _JOINED[type(node.op)], "and or")
        elif isinstance(node, ast.BinOp) and type(node.op) in _ADDED:
            yield self._between(node.left, node.right, _ADDED[type(node.op)], "plus minus")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield self._whole(node, "constant", str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield self._whole(node, "constant", str(node.value + 1))
        elif isinstance(node, ast.If):
            start, end = self._place(node.test)
            yield self._whole(node.test, "condition", f"not ({self.text[start:end].decode()})")
        elif isinstance(node, ast.Attribute) and _is_outcome(node):
            kind, member = ast.unparse(node.value), ast.unparse(node)
            yield self._whole(node, "outcome", f"next(x for x in {kind} if x is not {member})")
        elif isinstance(node, ast.stmt) and _can_be_dropped(node):
            yield self._whole(node, "dropped line", "pass")

    def _place(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _whole(self, node: ast.expr | ast.stmt, kind: str, after: str) -> Change:
        return self._change(node, *self._place(node), kind, after)

    def _between(
        self, left: ast.expr, right: ast.expr, words: tuple[str, str], kind: str
    ) -> Change:
        at = self.text.index(words[0].encode(), self._place(left)[1], self._place(right)[0])
        return self._change(left, at, at + len(words[0]), kind, words[1])

    def _change(
        self, node: ast.expr | ast.stmt, start: int, end: int, kind: str, after: str
    ) -> Change:
        before = self.text[start:end].decode()
        last = node.end_lineno or node.lineno
        return Change(self._path, node.lineno, last, start, end, kind, before, after)


def _is_outcome(node: ast.Attribute) -> bool:
    is_member = isinstance(node.value, ast.Name) and node.attr.isupper()
    return is_member and ast.unparse(node.value) in OUTCOMES


def _can_be_dropped(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.AugAssign):
        return True
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """All that runs and matters: no annotations, texts, logs, errors' words or type checking."""
    skipped = ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert
    if isinstance(node, skipped) or _logs(node) or _checks_types(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child)


def _logs(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else node
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "logger"
    )


def _checks_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
