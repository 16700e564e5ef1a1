# SPDX-License-Identifier: Apache-2.0
"""Which network interface carries a path, how fast it is, and where its card is plugged in."""

from __future__ import annotations

import ipaddress
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

from vllm_nvmeof_offload.fabric.sysfs import children, read_number, read_pcie_link
from vllm_nvmeof_offload.fabric.topology import Controller, PcieLink, TargetFabric

__all__ = ["NetPlaces", "Nic", "link_bytes_per_s", "nic_of", "nics_of", "pcie_bytes_per_s"]

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_DEPTH_MAX = 4
#: Bits on the wire for eight bits of data: 8b/10b up to 5 GT/s, then 128b/130b.
_OLD_SPEED_MAX = 5.0


@dataclass(frozen=True, slots=True)
class NetPlaces:
    """Where this host's interfaces and routes are read."""

    sysfs: str = "/sys"
    routes: str = "/proc/net/route"
    routes_v6: str = "/proc/net/ipv6_route"


@dataclass(frozen=True, slots=True)
class Nic:
    """An interface. speed_mbps: None where it says none, or is virtual over nothing.

    cards: PCIe links of the hardware under it; several under a bond.
    """

    name: str
    speed_mbps: int | None
    cards: tuple[PcieLink, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def nics_of(fabric: TargetFabric, places: NetPlaces) -> dict[str, Nic]:
    """By controller, the interface that carries it; those that cannot be told are left out."""
    found = {one.name: nic_of(one, places) for one in fabric.controllers if one.over_fabric}
    return {name: nic for name, nic in found.items() if nic is not None}


def nic_of(controller: Controller, places: NetPlaces) -> Nic | None:
    """The interface that carries `controller`: what it was told, else by this host's routes.

    Routes are of this process's network namespace, the connection may be in another; policy
    routing is not looked at.
    """
    name = controller.host_iface or _by_routes(controller, places)
    if name is None or not os.path.isdir(os.path.join(places.sysfs, "class/net", name)):
        return None
    directory = os.path.join(places.sysfs, "class/net", name)
    hardware = _hardware(directory, _DEPTH_MAX)
    # A veth or tap pair claims 10 Gb/s, whatever it really does.
    speed = read_number(directory, "speed") if hardware else None
    cards = [read_pcie_link(os.path.join(one, "device")) for one in hardware]
    return Nic(name, speed, tuple(card for card in cards if card is not None))


def _hardware(directory: str, depth: int) -> list[str]:
    """Directories of the interfaces with a device of their own: of this one, or under it."""
    if os.path.exists(os.path.join(directory, "device")):
        return [directory]
    if not depth:
        return []
    lower = [name for name in children(directory) if name.startswith("lower_")]
    return [one for name in lower for one in _hardware(os.path.join(directory, name), depth - 1)]


def _by_routes(controller: Controller, places: NetPlaces) -> str | None:
    routes = _routes_v4(places.routes) + _routes_v6(places.routes_v6)
    local = _address(controller.src_addr or controller.host_traddr)
    if local is not None:
        # The subnet tells the interface only if it is on one of them.
        names = {name for network, name in routes if network.prefixlen and local in network}
        if len(names) == 1:
            return names.pop()
        if names:
            return None
    remote = _address(controller.traddr)
    if remote is None:
        return None
    fitting = [(network.prefixlen, name) for network, name in routes if remote in network]
    return max(fitting)[1] if fitting else None


def _address(text: str | None) -> _Address | None:
    try:
        return ipaddress.ip_address((text or "").strip("[]"))
    except ValueError:
        return None


def _lines(path: str) -> list[list[str]]:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return [line.split() for line in file]
    except OSError:
        return []


def _routes_v4(path: str) -> list[tuple[_Network, str]]:
    """Interface, destination, …, mask as the eighth: numbers in the machine's byte order."""
    found: list[tuple[_Network, str]] = []
    for fields in _lines(path):
        try:
            raw = [int(fields[at], 16).to_bytes(4, sys.byteorder) for at in (1, 7)]
            mask = ipaddress.IPv4Address(raw[1])
            found.append((ipaddress.IPv4Network((raw[0], str(mask)), strict=False), fields[0]))
        except (ValueError, IndexError, OverflowError):
            continue  # the heading
    return found


def _routes_v6(path: str) -> list[tuple[_Network, str]]:
    """Destination, length of its prefix, …, interface as the last."""
    found: list[tuple[_Network, str]] = []
    for fields in _lines(path):
        try:
            raw = int(fields[0], 16).to_bytes(16, "big")
            network = ipaddress.IPv6Network((raw, int(fields[1], 16)), strict=False)
        except (ValueError, IndexError, OverflowError):
            continue
        found.append((network, fields[-1]))
    # Routes to nowhere are kept on lo.
    return [one for one in found if one[1] != "lo"]


def pcie_bytes_per_s(link: PcieLink) -> float | None:
    """What a PCIe link carries in one direction, before its protocol's own share."""
    if link.speed is None or link.width is None:
        return None
    share = 8 / 10 if link.speed <= _OLD_SPEED_MAX else 128 / 130
    return link.speed * 1e9 * share / 8 * link.width


def link_bytes_per_s(fabric: TargetFabric, nics: dict[str, Nic]) -> float | None:
    """What the links of all paths to a target allow together; None if one is not known.

    Two paths through one interface have that interface once. Several namespaces under one
    file system that share controllers share their links too.
    """
    rates: dict[str, float | None] = {}
    used = {path.controller for namespace in fabric.namespaces for path in namespace.paths}
    for controller in fabric.controllers:
        if controller.name not in used:
            continue
        if controller.pcie is not None:
            rates[controller.pcie.address] = pcie_bytes_per_s(controller.pcie)
            continue
        nic = nics.get(controller.name)
        name = nic.name if nic else controller.name
        rates[name] = nic.speed_mbps * 1e6 / 8 if nic and nic.speed_mbps else None
    known = [rate for rate in rates.values() if rate]
    return sum(known) if known and len(known) == len(rates) else None
