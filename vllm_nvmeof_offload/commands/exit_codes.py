# SPDX-License-Identifier: Apache-2.0
"""The exit codes of all commands, in one table.

`doctor` exits with the worst `Severity` of its findings, `pool check` with the worst `Damage`.
"""

from __future__ import annotations

#: The exit codes of all commands; docs/operations.md repeats this table.
EXIT_CODES = {
    0: "success; nothing needs attention",
    1: "doctor: works, but slower or less resilient than it could be; pool check: all damage was "
    "repaired; pool rm, pool prune: not confirmed, or chunks of unknown salt left; try: the prompt "
    "was not loaded, or the answers differ; bench --check, demo: a goal was missed",
    2: "failure: an option, a configuration or a file was rejected, or the command failed; "
    "doctor: something cannot run",
    4: "pool check: damage remains; the damaged chunks are recomputed",
    8: "pool check: a pool cannot be used",
    130: "interrupted",
}
#: The exit code of a command that failed or was refused.
FAILED = 2
EPILOG = "Exit codes:\n\n" + "\n\n".join(f"{code}: {says}." for code, says in EXIT_CODES.items())
