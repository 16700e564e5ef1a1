# SPDX-License-Identifier: Apache-2.0
"""The faults that `fuse_server` injects, and the files of its nodes."""

from __future__ import annotations

import os
import threading
import time
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
            if rule.get("skip", 0) > 0:
                rule["skip"] -= 1
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
