# SPDX-License-Identifier: Apache-2.0
"""Runs modules of the product in processes forked from one that has imported them.

A load starts a keeper of leases, and in an outage one prober after the other. An interpreter that
imports the product for one of these takes more of an emulated processor than the load itself. Only
its start is replaced: what the module runs in is a process with the same descriptors and arguments.
If the program that asked is killed, the module goes on.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import traceback
from importlib import import_module
from pathlib import Path

MODULES = ("vllm_nvmeof_offload.pool.keeper", "vllm_nvmeof_offload.targets.prober")
#: Where they are asked for, and the program that asks.
SOCKET, PYTHON = Path("/run/modules/socket"), Path("/run/modules/python")
REQUEST_BYTES_MAX = 4096
#: Takes the arguments of `python -m MODULE … FD`, as `child_command` and `start_child` give them.
PROGRAM = """#!{python} -IS
import _socket, sys
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
server.connect({path!r})
fds = b"".join(fd.to_bytes(4, "little") for fd in (0, 1, 2, int(sys.argv[-1])))
rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, fds)]
server.sendmsg(["\\0".join(sys.argv[2:-1]).encode()], rights)
sys.exit(int(server.recv(16) or 1))
"""


def serve() -> None:
    """Start the process from which the others are forked, and make `PYTHON`."""
    for module in MODULES:
        import_module(module)
    SOCKET.parent.mkdir()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(SOCKET))
    listener.listen()
    PYTHON.write_text(PROGRAM.format(python=sys.executable, path=str(SOCKET)))
    PYTHON.chmod(0o700)
    if os.fork():
        listener.close()
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        asked, _ = listener.accept()
        if not os.fork():
            listener.close()
            _answer(asked)
        asked.close()


def _answer(asked: socket.socket) -> None:
    """Run a module, and send its exit status; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, fds, *_ = socket.recv_fds(asked, REQUEST_BYTES_MAX, 4)
    pid = os.fork()
    if not pid:
        asked.close()
        _run(message.decode().split("\0"), fds)
    for fd in fds:
        os.close(fd)
    _, status = os.waitpid(pid, 0)
    asked.send(str(os.waitstatus_to_exitcode(status) % 256).encode())
    os._exit(0)


def _run(arguments: list[str], fds: list[int]) -> None:
    *streams, fd = fds
    for number, one in enumerate(streams):
        os.dup2(one, number)
        os.close(one)
    os.setsid()
    os.chdir("/")
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.argv = [*arguments, str(fd)]
    del sys.modules[arguments[0]]  # what it imports stays
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except BaseException:  # noqa: BLE001 - it is the end of this process
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
