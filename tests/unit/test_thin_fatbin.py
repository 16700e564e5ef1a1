# SPDX-License-Identifier: Apache-2.0
"""Machine code of other GPUs is zeroed in a library; everything else stays in place."""

from __future__ import annotations

import struct

import pytest

from tests.unit.gpu_tools import tool

thin = tool("thin_fatbin").thin
PTX, CODE = 1, 2


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    """A fat binary with entries (kind, architecture, payload), laid out as nvcc does."""
    body = b""
    for kind, arch, payload in entries:
        head = struct.pack("<HHIQ", kind, 0x101, 64, len(payload))
        body += head.ljust(28, b"\x01") + struct.pack("<I", arch).ljust(36, b"\x01") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_only_the_machine_code_for_this_gpu_stays() -> None:
    whole = [(CODE, 80, b"a" * 8), (CODE, 90, b"b" * 16), (PTX, 90, b"c" * 24)]
    library = b"elf" + fat_binary(*whole) + b"text" + fat_binary((CODE, 120, b"d" * 8)) + b"end"
    thinned = bytearray(library)
    assert thin(thinned, "sm_90") == (16 + 8, 8 + 24)
    kept = [(CODE, 80, bytes(8)), (CODE, 90, b"b" * 16), (PTX, 90, bytes(24))]
    # Without code for this GPU the driver needs the rest.
    assert thinned == (
        b"elf" + fat_binary(*kept) + b"text" + fat_binary((CODE, 120, b"d" * 8)) + b"end"
    )


def test_ptx_stays_where_there_is_no_machine_code() -> None:
    library = bytearray(fat_binary((CODE, 80, b"a" * 8), (PTX, 80, b"c" * 8)))
    before = bytes(library)
    assert thin(library, "sm_90") == (16, 0)
    assert library == before


@pytest.mark.parametrize("version", [2, 1])
def test_bytes_that_only_begin_like_a_fat_binary_stay(version: int) -> None:
    """Another version; and a size that ends behind the library."""
    library = bytearray(b"x" + struct.pack("<IHHQ", 0xBA55ED50, version, 16, 10_000) + b"data")
    before = bytes(library)
    assert thin(library, "sm_90") == (0, 0)
    assert library == before


def test_entries_of_an_unknown_form_are_an_error() -> None:
    library = bytearray(fat_binary((CODE, 80, b"a" * 8), (CODE, 90, b"b" * 8)))
    library[16 + 4] = 8  # the bytes of the first entry's header
    with pytest.raises(ValueError, match="the fat binary at byte 0 has an unknown kind of entry"):
        thin(library, "sm_90")


def test_an_architecture_has_a_number() -> None:
    with pytest.raises(ValueError, match="hopper is not an architecture such as sm_90"):
        thin(bytearray(), "hopper")
