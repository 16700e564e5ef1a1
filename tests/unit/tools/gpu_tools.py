# SPDX-License-Identifier: Apache-2.0
"""The scripts of `tools/` that are for a GPU machine, imported as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]


def tool(name: str) -> ModuleType:
    """`tools/NAME.py`, imported once."""
    known = f"tools_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, ROOT / "tools" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[known] = module
        spec.loader.exec_module(module)
    return sys.modules[known]
