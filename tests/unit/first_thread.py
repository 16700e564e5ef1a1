# SPDX-License-Identifier: Apache-2.0
"""A half-ended process: its first thread has exited and another runs. A process killed while a
thread waits in the kernel for a device is in the same state.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

_SYS_EXIT = {"x86_64": 60, "aarch64": 93}  # of one thread


def end_first_thread() -> None:
    """Never returns; the process ends with its standard input."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
    ctypes.CDLL(None).syscall(_SYS_EXIT[os.uname().machine], 0)


if __name__ == "__main__":
    end_first_thread()
