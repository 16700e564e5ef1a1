# SPDX-License-Identifier: Apache-2.0
"""A passthrough file system with faults: `python -m tests.faults.fuse_server BACKING PLACE [sync]`.

The server implements the kernel's FUSE protocol itself, so that tests need neither a compiler nor
libfuse. Every file is opened with FOPEN_DIRECT_IO: requests arrive with the length that the caller
issued (up to 1 MiB), and none is answered from the page cache. Many threads serve, so that a
request that hangs does not block the others.

Commands are JSON lines on stdin, each answered by a JSON line on stdout:

* `{"rules": [rule, …]}` replaces all rules; requests that hang by the old ones continue. A rule:
  `name`, `op` ("read", "write", "fsync", "fallocate", "open", "create"), `path` (the file's
  name), `do` ("errno", "hang", "delay", "short"), `value` (errno, seconds, or bytes to move),
  `count` (requests to strike; -1: all).
* `{}` changes nothing. The answer: `fired` (rule name → how often), `hanging`, `lengths` (rule
  name → lengths of the requests that the rule struck).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

ROOT = 1


class Faults:
    """The rules, their counts, and the requests that hang."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rules: list[dict[str, Any]] = []
        self._fired: dict[str, int] = {}
        self._lengths: dict[str, list[int]] = {}
        self._hanging = 0

    def replace(self, rules: list[dict[str, Any]]) -> None:
        with self._changed:
            self._rules = rules
            self._changed.notify_all()

    def report(self) -> dict[str, Any]:
        with self._changed:
            return {"fired": self._fired, "hanging": self._hanging, "lengths": self._lengths}

    def strike(self, op: str, path: str, length: int = 0) -> int:
        """Apply the first rule that matches; return how many bytes may be moved.

        Raises:
            OSError: the error that the rule names.
        """
        with self._changed:
            rule = self._take(op, path, length)
            if rule is None:
                return length
            if rule["do"] == "hang":
                self._hanging += 1
                self._changed.wait_for(lambda: rule not in self._rules)
                self._hanging -= 1
                return length
        if rule["do"] == "errno":
            raise OSError(rule["value"], os.strerror(rule["value"]))
        if rule["do"] == "delay":
            time.sleep(rule["value"])
            return length
        assert rule["do"] == "short"
        return min(rule["value"], length)

    def _take(self, op: str, path: str, length: int) -> dict[str, Any] | None:
        for rule in self._rules:
            if rule["op"] != op or rule["path"] != path.rpartition("/")[2]:
                continue
            if rule.get("count", -1) == 0:
                continue
            rule["count"] = rule.get("count", -1) - (rule.get("count", -1) > 0)
            self._fired[rule["name"]] = self._fired.get(rule["name"], 0) + 1
            self._lengths.setdefault(rule["name"], []).append(length)
            return rule
        return None


class Nodes:
    """Node number ↔ path below the backing directory."""

    def __init__(self, backing: str) -> None:
        self._lock = threading.Lock()
        self._paths = {ROOT: backing}
        self._numbers = {backing: ROOT}
        self._next = ROOT + 1

    def path(self, node: int, name: bytes = b"") -> str:
        with self._lock:
            path = self._paths[node]
        return f"{path}/{os.fsdecode(name)}" if name else path

    def number(self, path: str) -> int:
        with self._lock:
            if path not in self._numbers:
                self._numbers[path] = self._next
                self._paths[self._next] = path
                self._next += 1
            return self._numbers[path]

    def forget(self, path: str) -> None:
        """Forget the path: the next file that is created there is another node."""
        with self._lock:
            self._numbers.pop(path, None)

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            number = self._numbers.pop(old, None)
            self._numbers.pop(new, None)
            if number is not None:
                self._numbers[new] = number
                self._paths[number] = new


THREADS = 48
MAX_WRITE = 1 << 20
MAX_PAGES = MAX_WRITE >> 12

_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_OPEN_OUT = struct.Struct("<QII")
_RW_IN = struct.Struct("<QQIIQII")
_SETATTR_IN = struct.Struct("<II6Q8I")
_INIT_OUT = struct.Struct("<IIIIHHIIHHI7I")
_STATFS_OUT = struct.Struct("<5Q4I6I")
#: ASYNC_READ, ATOMIC_O_TRUNC, BIG_WRITES, PARALLEL_DIROPS, MAX_PAGES.
_FLAGS = 1 | 1 << 3 | 1 << 5 | 1 << 18 | 1 << 22
#: With it the kernel turns a short asynchronous write into EIO (`fuse_get_res_by_io`). Without it
#: io_uring continues by itself after a short transfer of an O_DIRECT file, at the offset where the
#: transfer began (FUSE does not move `ki_pos`): Linux 6.18.
_ASYNC_DIO = 1 << 15
#: DIRECT_IO and PARALLEL_DIRECT_WRITES: one write that hangs does not lock out the others.
_FOPEN = 1 | 1 << 6
_NOT_OURS = os.O_DIRECT | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


class Server:
    """Answers the kernel. One method per operation; an `OSError` becomes the answer's error."""

    def __init__(self, device: int, backing: str, faults: Faults, async_dio: bool) -> None:
        self._device = device
        self._async_dio = async_dio
        self._nodes = Nodes(backing)
        self._faults = faults
        self._names: dict[int, str] = {}  # handle → path when it was opened
        self._handlers: dict[int, Callable[[int, bytes], bytes]] = {
            1: self.lookup,
            3: self.getattr,
            4: self.setattr,
            9: self.mkdir,
            10: self.unlink,
            11: self.unlink,
            12: self.rename,
            14: self.open,
            15: self.read,
            16: self.write,
            17: self.statfs,
            18: self.release,
            20: self.fsync,
            25: self.done,
            26: self.init,
            27: self.opendir,
            28: self.readdir,
            29: self.release,
            30: self.done,
            35: self.create,
            43: self.fallocate,
            45: self.rename2,
        }

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, MAX_WRITE + 8192)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                return  # ENODEV: unmounted
            _, opcode, unique, node, *_ = _IN.unpack_from(request)
            if opcode in (2, 36, 42):  # forget, interrupt, batch forget: no answer
                continue
            error_number, answer = 0, b""
            try:
                handler = self._handlers.get(opcode)
                if handler is None:
                    raise OSError(errno.ENOSYS, "")
                answer = handler(node, request[_IN.size :])
            except OSError as error:
                error_number = error.errno or errno.EIO
            head = _OUT.pack(_OUT.size + len(answer), -error_number, unique)
            try:
                os.write(self._device, head + answer)
            except OSError as error:
                if error.errno != errno.ENOENT:  # ENOENT: the caller is gone
                    return

    def init(self, node: int, body: bytes) -> bytes:
        offered = struct.unpack_from("<IIII", body)[3]
        flags = offered & (_FLAGS | (_ASYNC_DIO if self._async_dio else 0))
        return _INIT_OUT.pack(
            *(7, 31, 0, flags, 512, 384, MAX_WRITE, 1, MAX_PAGES, 0, 0), *([0] * 7)
        )

    def _attr(self, status: os.stat_result) -> bytes:
        times = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
        return _ATTR.pack(
            *(status.st_ino, status.st_size, status.st_blocks),
            *(time_ns // 10**9 for time_ns in times),
            *(time_ns % 10**9 for time_ns in times),
            *(status.st_mode, status.st_nlink, status.st_uid, status.st_gid, 0, 4096, 0),
        )

    def _entry(self, path: str) -> bytes:
        status = os.lstat(path)
        return struct.pack("<QQQQII", self._nodes.number(path), 0, 0, 0, 0, 0) + self._attr(status)

    def lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(self._nodes.path(node, body.rstrip(b"\0")))

    def getattr(self, node: int, body: bytes) -> bytes:
        flags, _, handle = struct.unpack_from("<IIQ", body)
        status = os.fstat(handle) if flags & 1 else os.lstat(self._nodes.path(node))
        return bytes(16) + self._attr(status)

    def setattr(self, node: int, body: bytes) -> bytes:
        valid, _, handle, size, *rest = _SETATTR_IN.unpack_from(body)
        path = self._nodes.path(node)
        if valid & 1:
            os.chmod(path, stat.S_IMODE(rest[7]))
        if valid & 8:
            os.truncate(handle if valid & 64 else path, size)
        return bytes(16) + self._attr(os.fstat(handle) if valid & 64 else os.lstat(path))

    def mkdir(self, node: int, body: bytes) -> bytes:
        path = self._nodes.path(node, body[8:].rstrip(b"\0"))
        os.mkdir(path, struct.unpack_from("<I", body)[0] & 0o777)
        return self._entry(path)

    def unlink(self, node: int, body: bytes) -> bytes:
        path = self._nodes.path(node, body.rstrip(b"\0"))
        (os.rmdir if os.path.isdir(path) else os.unlink)(path)
        self._nodes.forget(path)
        return b""

    def rename(self, node: int, body: bytes, names_at: int = 8) -> bytes:
        old_name, new_name = body[names_at:].rstrip(b"\0").split(b"\0")
        old = self._nodes.path(node, old_name)
        new = self._nodes.path(struct.unpack_from("<Q", body)[0], new_name)
        os.rename(old, new)
        self._nodes.rename(old, new)
        return b""

    def rename2(self, node: int, body: bytes) -> bytes:
        return self.rename(node, body, names_at=16)

    def _opened(self, path: str, flags: int, mode: int = 0) -> bytes:
        handle = os.open(path, flags, mode)
        self._names[handle] = path
        return _OPEN_OUT.pack(handle, _FOPEN, 0)

    def open(self, node: int, body: bytes) -> bytes:
        path = self._nodes.path(node)
        self._faults.strike("open", path)
        return self._opened(path, struct.unpack_from("<I", body)[0] & ~_NOT_OURS)

    def opendir(self, node: int, body: bytes) -> bytes:
        return self._opened(self._nodes.path(node), os.O_RDONLY | os.O_DIRECTORY)

    def readdir(self, node: int, body: bytes) -> bytes:
        handle, offset, size, *_ = _RW_IN.unpack_from(body)
        answer = b""
        for number, name in enumerate(sorted(map(os.fsencode, os.listdir(handle))), 1):
            entry = struct.pack("<QQII", number, number, len(name), 0) + name
            entry += bytes(-len(entry) % 8)
            if number > offset and len(answer) + len(entry) <= size:
                answer += entry
        return answer

    def create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        path = self._nodes.path(node, body[16:].rstrip(b"\0"))
        self._faults.strike("create", path)
        opened = self._opened(path, flags & ~os.O_DIRECT | os.O_CREAT, mode & 0o777)
        return self._entry(path) + opened

    def read(self, node: int, body: bytes) -> bytes:
        handle, offset, size, *_ = _RW_IN.unpack_from(body)
        size = self._faults.strike("read", self._names[handle], size)
        return os.pread(handle, size, offset)

    def write(self, node: int, body: bytes) -> bytes:
        handle, offset, size, *_ = _RW_IN.unpack_from(body)
        size = self._faults.strike("write", self._names[handle], size)
        data = memoryview(body)[_RW_IN.size :][:size]
        return struct.pack("<II", os.pwrite(handle, data, offset) if size else 0, 0)

    def fsync(self, node: int, body: bytes) -> bytes:
        handle = struct.unpack_from("<Q", body)[0]
        self._faults.strike("fsync", self._names[handle])
        os.fsync(handle)
        return b""

    def fallocate(self, node: int, body: bytes) -> bytes:
        handle, offset, length, _ = struct.unpack_from("<QQQI", body)
        self._faults.strike("fallocate", self._names[handle])
        os.posix_fallocate(handle, offset, length)
        return b""

    def statfs(self, node: int, body: bytes) -> bytes:
        status = os.statvfs(self._nodes.path(ROOT))
        counts = (status.f_blocks, status.f_bfree, status.f_bavail, status.f_files, status.f_ffree)
        return _STATFS_OUT.pack(
            *counts, status.f_bsize, status.f_namemax, status.f_frsize, 0, *([0] * 6)
        )

    def release(self, node: int, body: bytes) -> bytes:
        handle = struct.unpack_from("<Q", body)[0]
        self._names.pop(handle, None)
        os.close(handle)
        return b""

    def done(self, node: int, body: bytes) -> bytes:
        return b""


def mount(place: str) -> int:
    """Mount at `place`; return the descriptor to serve."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the test
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40755,user_id={os.getuid()},group_id={os.getgid()}"
    nosuid_nodev = 2 | 4
    names = (b"vnvme-faults", os.fsencode(place), b"fuse.vnvme-faults")
    if libc.mount(*names, nosuid_nodev, options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), place)
    return device


def main() -> None:
    backing, place, *more = sys.argv[1:]
    faults = Faults()
    try:
        server = Server(mount(place), backing, faults, "sync" not in more)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    for _ in range(THREADS):
        threading.Thread(target=server.serve, daemon=True).start()
    print(json.dumps(faults.report()), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if "rules" in command:
            faults.replace(command["rules"])
        print(json.dumps(faults.report()), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
