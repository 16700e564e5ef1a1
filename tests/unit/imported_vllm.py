# SPDX-License-Identifier: Apache-2.0
"""A process that has imported vLLM, which takes ten seconds of a core, and forks for each run.

It reads one run per line (JSON) from standard input and answers with its exit status. A run ends as
an interpreter of its own does, and leaves nothing behind here.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 300


class ImportedVllm:
    """`run` is `subprocess.run` of this Python, without the time of importing vLLM."""

    def __init__(self, scratch: Path) -> None:
        self._files = {"stdout": scratch / "out", "stderr": scratch / "err"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.imported_vllm"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # no math threads that a fork would lack
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, arguments: list[str], env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `-c SOURCE` or `-m MODULE` with its arguments; env: all of it, ours if None."""
        files = {name: str(file) for name, file in self._files.items()}
        order = {"arguments": arguments, "env": dict(os.environ if env is None else env), **files}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that has imported vLLM has ended"
        texts = {name: file.read_text() for name, file in self._files.items()}
        return subprocess.CompletedProcess(arguments, int(answer), **texts)

    def close(self) -> None:
        self._process.communicate(timeout=LIMIT_S)


def main() -> None:
    import vllm.engine.arg_utils  # noqa: F401 - once, before all forks

    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _be(order)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _be(order: dict[str, Any]) -> None:
    for number, name in ((0, os.devnull), (1, order["stdout"]), (2, order["stderr"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.environ.clear()
    os.environ.update(order["env"])
    way, what, *arguments = order["arguments"]
    sys.argv = [what, *arguments]
    if way == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
