# SPDX-License-Identifier: Apache-2.0
"""The RDMA ports of this machine and their GIDs, from sysfs. None means unknown.

A RoCE port has a GID for each address of its network interface. A connection uses the GID of its
own address, whose type decides which packets carry the connection.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass

from vllm_nvmeof_offload.fabric.topology import children, read_text

ACTIVE = "ACTIVE"
ROCE_V2 = "RoCE v2"
#: The header bytes that the kernel reserves in a RoCE frame, and the sizes that a payload can have.
ROCE_HEADER_BYTES = 96
_PAYLOADS = (4096, 2048, 1024, 512, 256)


@dataclass(frozen=True, slots=True)
class Gid:
    """A GID of a RoCE port. `kind` is `ROCE_V2`, or "IB/RoCE v1" (packets without IP)."""

    index: int
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    kind: str | None
    interface: str


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an RDMA device. `state` is `ACTIVE`, DOWN, INIT or ARMED. `gids` is empty for an
    InfiniBand port, whose GIDs belong to no network interface."""

    device: str
    number: str
    state: str | None
    gids: tuple[Gid, ...]

    def on(self, interface: str) -> list[Gid]:
        return [gid for gid in self.gids if gid.interface == interface]


def read_rdma_ports(sysfs: str = "/sys") -> list[RdmaPort]:
    found = []
    top = os.path.join(sysfs, "class/infiniband")
    for device in children(top):
        for number in children(top, device, "ports"):
            port = os.path.join(top, device, "ports", number)
            state = (read_text(port, "state") or "").rpartition(" ")[2]  # such as "4: ACTIVE"
            found.append(RdmaPort(device, number, state or None, tuple(_gids(port))))
    return found


def _gids(port: str) -> list[Gid]:
    found = []
    for index in children(port, "gid_attrs/ndevs"):
        interface = read_text(port, "gid_attrs/ndevs", index)  # an error where there is no GID
        raw = read_text(port, "gids", index)
        if interface is None or raw is None:
            continue
        address = ipaddress.IPv6Address(raw)
        kind = read_text(port, "gid_attrs/types", index)
        found.append(Gid(int(index), address.ipv4_mapped or address, kind, interface))
    return found


def roce_payload_bytes(mtu: int) -> int:
    """Return the payload bytes of a RoCE packet on an interface with this Ethernet MTU."""
    fits = [one for one in _PAYLOADS if one + ROCE_HEADER_BYTES <= mtu]
    return fits[0] if fits else 0
