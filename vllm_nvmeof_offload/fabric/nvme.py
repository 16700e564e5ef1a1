# SPDX-License-Identifier: Apache-2.0
"""NVMe in sysfs: from a namespace's block device to its subsystem, controllers and paths.

With native multipath nvme0n1 is a head below the subsystem, and each path is a hidden device
below its controller: nvme0c1n1 is the path of head nvme0n1 through controller nvme1. Without
it nvme1n1 lies below controller nvme1, and is its own only path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from vllm_nvmeof_offload.fabric.blocks import read_limits, read_size
from vllm_nvmeof_offload.fabric.sysfs import (
    children,
    read_number,
    read_pcie_link,
    read_text,
    read_timeout,
    resolve,
)
from vllm_nvmeof_offload.fabric.topology import Controller, Namespace, Path, Subsystem

__all__ = ["namespace_at", "namespaces"]

_HEAD = re.compile(r"^nvme([0-9]+)n([0-9]+)$")
_PATH = re.compile(r"^nvme([0-9]+)c[0-9]+n([0-9]+)$")
_CONTROLLER = re.compile(r"^nvme[0-9]+$")
_NONE = re.compile(r"^[0-]*$")  # an identifier of zeros alone is none


def namespaces(sysfs: str) -> Iterator[Namespace]:
    """All namespaces of this host, each block device once."""
    for name in children(sysfs, "class/block"):
        path = resolve(sysfs, "class/block", name)
        found = namespace_at(path, sysfs) if path else None
        if found is not None:
            yield found


def namespace_at(path: str, sysfs: str) -> Namespace | None:
    """The namespace whose block device is at `path` in sysfs; None if it is no NVMe namespace."""
    name = os.path.basename(path)
    if not _HEAD.match(name):
        return None
    parent = resolve(path, "device") or os.path.dirname(path)
    single = _CONTROLLER.match(os.path.basename(parent)) is not None
    if single:
        subsystem = _subsystem(_subsystem_of(os.path.basename(parent), sysfs), [parent])
        paths = [_path(path, os.path.basename(parent))]
    else:
        controllers = _controllers_of(parent, sysfs)
        subsystem = _subsystem(parent, controllers)
        paths = [one for directory in controllers for one in _paths(directory, name)]
    return Namespace(
        device=name,
        nsid=read_number(path, "nsid"),
        wwid=read_text(path, "wwid"),
        uuid=_identifier(path, "uuid"),
        nguid=_identifier(path, "nguid"),
        size_bytes=read_size(path),
        limits=read_limits(path),
        multipath=not single,
        subsystem=subsystem,
        paths=tuple(paths),
    )


def _identifier(*parts: str) -> str | None:
    text = read_text(*parts)
    return None if text is None or _NONE.match(text) else text


def _subsystem_of(controller: str, sysfs: str) -> str | None:
    directory = os.path.join(sysfs, "class/nvme-subsystem")
    for name in children(directory):
        if controller in children(directory, name):
            return resolve(directory, name)
    return None


def _controllers_of(subsystem: str, sysfs: str) -> list[str]:
    """Directories of a subsystem's controllers, which are links in it."""
    names = [name for name in children(subsystem) if _CONTROLLER.match(name)]
    found = [resolve(subsystem, name) or resolve(sysfs, "class/nvme", name) for name in names]
    return [directory for directory in found if directory is not None]


def _paths(controller: str, head: str) -> list[Path]:
    """Paths of `head` through the controller in that directory: one, or none."""
    wanted = _HEAD.match(head)
    assert wanted is not None
    found = []
    for name in children(controller):
        match = _PATH.match(name)
        if match and match.groups() == wanted.groups():
            found.append(_path(os.path.join(controller, name), os.path.basename(controller)))
    return found


def _path(directory: str, controller: str) -> Path:
    return Path(
        name=os.path.basename(directory),
        controller=controller,
        path=directory,
        ana_state=read_text(directory, "ana_state"),
        ana_group=read_number(directory, "ana_grpid"),
    )


def _subsystem(directory: str | None, controllers: list[str]) -> Subsystem:
    """directory: None where it cannot be found; a controller knows the most of it too."""
    places = [*([directory] if directory else []), *controllers]

    def first(attribute: str) -> str | None:
        return next(filter(None, (read_text(place, attribute) for place in places)), None)

    return Subsystem(
        name=os.path.basename(directory) if directory else None,
        nqn=first("subsysnqn"),
        iopolicy=read_text(directory, "iopolicy") if directory else None,
        model=first("model"),
        serial=first("serial"),
        controllers=tuple(_controller(one) for one in controllers),
    )


def _controller(directory: str) -> Controller:
    where = _address(read_text(directory, "address"))
    return Controller(
        name=os.path.basename(directory),
        transport=read_text(directory, "transport"),
        traddr=where.get("traddr"),
        trsvcid=where.get("trsvcid"),
        host_traddr=where.get("host_traddr"),
        host_iface=where.get("host_iface"),
        src_addr=where.get("src_addr"),
        state=read_text(directory, "state"),
        cntlid=read_number(directory, "cntlid"),
        hostnqn=read_text(directory, "hostnqn"),
        queue_count=read_number(directory, "queue_count"),
        sqsize=read_number(directory, "sqsize"),
        kato=read_number(directory, "kato"),
        ctrl_loss_tmo=read_timeout(directory, "ctrl_loss_tmo"),
        fast_io_fail_tmo=read_timeout(directory, "fast_io_fail_tmo"),
        reconnect_delay=read_timeout(directory, "reconnect_delay"),
        numa_node=read_number(directory, "numa_node"),
        tls=_tls(directory),
        dhchap=_dhchap(directory),
        pcie=read_pcie_link(os.path.join(directory, "device")),
    )


def _address(text: str | None) -> dict[str, str]:
    """Of "traddr=10.0.0.1,trsvcid=4420,…"; a PCI address has no "="."""
    if text is None:
        return {}
    if "=" not in text:
        return {"traddr": text}
    pairs = (part.partition("=") for part in text.split(","))
    return {name.strip(): value.strip() for name, _, value in pairs if value.strip()}


def _tls(directory: str) -> str | None:
    """On with the serial number of a key in use; the kernel shows an empty one without."""
    key = read_text(directory, "tls_key")
    if key is not None:
        return "off" if _NONE.match(key) else "on"
    try:
        with open(os.path.join(directory, "tls_key"), encoding="ascii", errors="replace") as file:
            return "off" if not file.read(1).strip("\0\n ") else None
    except OSError:
        return None


def _dhchap(directory: str) -> str | None:
    """Whether there is a secret, which goes no further than this function."""
    secret = read_text(directory, "dhchap_secret")
    if secret == "none":
        return "off"
    return "on" if secret is not None and secret.startswith("DHHC-1:") else None
