# SPDX-License-Identifier: Apache-2.0
"""On PYTHONPATH of tests under a mutant, and so of all processes that they start: the module of the
change NVMEOF_CHANGE is compiled with it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

_CHANGES = Path(__file__).parents[1] / "changes.py"


class Changed(SourceFileLoader, MetaPathFinder):
    """Finds and loads one module."""

    def __init__(self, name: str) -> None:
        spec = importlib.util.spec_from_file_location("nvmeof_changes", _CHANGES)
        assert spec is not None and spec.loader is not None
        changes = importlib.util.module_from_spec(spec)
        sys.modules["nvmeof_changes"] = changes
        spec.loader.exec_module(changes)
        self._change = changes.named(name)
        path = changes.PACKAGE / self._change.path
        parts = path.relative_to(changes.ROOT).with_suffix("").parts
        self._module = ".".join(parts).removesuffix(".__init__")
        super().__init__(self._module, str(path))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        source = self._change.apply(self.get_data(self.path))
        code: CodeType = compile(source, self.path, "exec", dont_inherit=True)
        return code


if _name := os.environ.get("NVMEOF_CHANGE"):
    sys.meta_path.insert(0, Changed(_name))
