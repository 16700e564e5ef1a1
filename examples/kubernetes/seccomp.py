# SPDX-License-Identifier: Apache-2.0
"""Adds io_uring's three system calls to a container runtime's default seccomp profile.

    python examples/kubernetes/seccomp.py default.json > vllm-io-uring.json

default.json is the profile that your runtime ships (for Docker and containerd: default.json from
moby's profiles/seccomp, in the release that you run). Kubernetes: put the result on each node as
/var/lib/kubelet/seccomp/profiles/vllm-io-uring.json. Docker: --security-opt seccomp=FILE.
"""

from __future__ import annotations

import json
import sys
from typing import Any

CALLS = ["io_uring_setup", "io_uring_enter", "io_uring_register"]


def allow_io_uring(profile: dict[str, Any]) -> dict[str, Any]:
    """Return `profile` with a rule that allows `CALLS`, which are removed from all other rules,
    because two rules for one call could contradict each other."""
    rules = []
    for rule in profile.get("syscalls", []):
        names = [name for name in rule["names"] if name not in CALLS]
        if names:
            rules.append({**rule, "names": names})
    rules.append({"names": CALLS, "action": "SCMP_ACT_ALLOW"})
    return {**profile, "syscalls": rules}


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        json.dump(allow_io_uring(json.load(file)), sys.stdout, indent=2)
