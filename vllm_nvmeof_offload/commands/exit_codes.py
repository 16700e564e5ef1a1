# SPDX-License-Identifier: Apache-2.0
"""The exit codes of all commands.

`doctor` exits with the worst `Severity` of its findings, `pool check` with the worst `Damage`.
"""

from __future__ import annotations

#: docs/operations.md repeats this table.
EXIT_CODES = {
    0: "success; nothing needs attention",
    1: "doctor: works, but slower or less resilient than it could be; pool check: all damage was "
    "repaired; pool rm, pool prune: not confirmed, or chunks with an unknown salt remain; try: the "
    "prompt was not loaded, or the answers differ; bench --check, demo: a goal was missed",
    2: "failure: an option, a configuration or a file was rejected, or the command failed; "
    "doctor: something cannot run",
    4: "pool check: damage remains; the damaged chunks are recomputed",
    8: "pool check: a pool cannot be used",
    130: "interrupted",
}
FAILED = 2
EPILOG = "Exit codes:\n\n" + "\n\n".join(f"{code}: {says}." for code, says in EXIT_CODES.items())
