# SPDX-License-Identifier: Apache-2.0
"""Commands that run a module of this package in a process of its own.

In a vLLM that has this package in its tree, `python -m` would import the packages above this one
first. vLLM's imports torch: seconds and hundreds of MB, for a process that needs neither.
"""

from __future__ import annotations

import os
import sys

_PACKAGE = __name__.rpartition(".")[0]
_ABOVE = _PACKAGE.rpartition(".")[0]
#: Arguments: the packages above, dotted; their last one's directory; the module; the module's own.
_RUN_BELOW_EMPTY_PACKAGES = """\
import runpy, sys, types
above, directory, module = sys.argv[1:4]
del sys.argv[1:4]
names = above.split(".")
for end in range(1, len(names) + 1):
    package = types.ModuleType(".".join(names[:end]))
    package.__path__ = [directory] if end == len(names) else []
    sys.modules[package.__name__] = package
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def child_command(module: str) -> list[str]:
    """The start of a command line that runs `module`, named within this package: `pool.keeper`."""
    name = f"{_PACKAGE}.{module}"
    if not _ABOVE:
        return [sys.executable, "-m", name]
    directory = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [sys.executable, "-c", _RUN_BELOW_EMPTY_PACKAGES, _ABOVE, directory, name]
