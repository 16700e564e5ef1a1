# SPDX-License-Identifier: Apache-2.0
"""What people write on a command line: links, rates, durations, numbers of tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_nvmeof_offload.units import parse_bytes

__all__ = ["Link", "parse_duration", "parse_link", "parse_rate", "parse_tokens"]

#: Transfers per second and lane, and the share of them that carries data (line encoding).
_PCIE = {3: (8e9, 128 / 130), 4: (16e9, 128 / 130), 5: (32e9, 128 / 130), 6: (64e9, 242 / 256)}
_LINK = re.compile(r"^\s*(?:(\d+)\s*x\s*)?(.+?)\s*$", re.IGNORECASE)
_PCIE_NAME = re.compile(r"^pcie\s*(?:gen)?\s*(\d)\s*x\s*(\d+)$", re.IGNORECASE)
_NETWORK = re.compile(r"^(\d+(?:\.\d+)?)\s*(?:gbe|gbps|gbit/s|gb/s|gbib|gib)$", re.IGNORECASE)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(us|ms|s|min)\s*$", re.IGNORECASE)
_TOKENS = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([km]?)\s*$", re.IGNORECASE)
_LANES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Link:
    """`count` links of `bytes_per_s` each in one direction, by the line rate."""

    text: str
    count: int
    bytes_per_s: float

    @property
    def total_bytes_per_s(self) -> float:
        return self.count * self.bytes_per_s


def parse_link(text: str) -> Link:
    """Parse `100GbE`, `2x400GbE`, `pcie5x16`, `4xpcie4x8` or a rate such as `2x12.5GB/s`.

    Raises:
        ValueError: none of these.
    """
    match = _LINK.match(text)
    assert match is not None or not text.strip(), text
    count, name = (int(match.group(1) or 1), match.group(2)) if match else (0, "")
    rate = _one_link(name)
    if rate is None or count < 1:
        raise ValueError(
            f"{text!r} is not a link; write 100GbE, 2x400GbE, pcie5x16 or a rate such as 12.5GB/s"
        )
    return Link(text.strip(), count, rate)


def parse_rate(text: str) -> float:
    """Parse `6.5GB/s` or `900 MiB/s` into bytes per second.

    Raises:
        ValueError: no rate, or none above 0.
    """
    amount, slash, per = text.strip().rpartition("/")
    if slash and per.lower() == "s":
        rate = parse_bytes(amount)
        if rate > 0:
            return float(rate)
    raise ValueError(f"{text!r} is not a rate above 0; write 6.5GB/s or 900MiB/s")


def parse_duration(text: str) -> float:
    """Parse `2s` or `500ms` into seconds.

    Raises:
        ValueError: no duration, or none above 0.
    """
    match = _DURATION.match(text)
    seconds = float(match.group(1)) * _SECONDS[match.group(2).lower()] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"{text!r} is not a duration above 0; write 2s or 500ms")
    return seconds


def parse_tokens(text: str) -> int:
    """Parse `32768`, `128k` (times 1024) or `1M` (times 1024²).

    Raises:
        ValueError: no number of tokens, or none above 0.
    """
    match = _TOKENS.match(text)
    scale = {"": 1, "k": 1 << 10, "m": 1 << 20}
    tokens = int(float(match.group(1)) * scale[match.group(2).lower()]) if match else 0
    if tokens <= 0:
        raise ValueError(f"{text!r} is not a number of tokens above 0; write 32768 or 128k")
    return tokens


def _one_link(name: str) -> float | None:
    """Bytes per second of one link, in one direction; None: not a link."""
    pcie = _PCIE_NAME.match(name)
    if pcie:
        generation, lanes = int(pcie.group(1)), int(pcie.group(2))
        if generation not in _PCIE or lanes not in _LANES:
            return None
        transfers, share = _PCIE[generation]
        return lanes * transfers * share / 8
    network = _NETWORK.match(name)
    # 12.5GB/s is bytes, 100Gb/s is bits: the only place where the case of a letter tells.
    if network and "B/s" not in name:
        return float(network.group(1)) * 1e9 / 8 or None
    try:
        return parse_rate(name)
    except ValueError:
        return None
