# SPDX-License-Identifier: Apache-2.0
"""Mutations of bytes, for hypothesis."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

#: Mutations, applied one after the other: (operation, offset, bytes).
flips = st.tuples(st.just("xor"), st.integers(0, 1 << 16), st.binary(min_size=1, max_size=8))
overwrites = st.tuples(st.just("put"), st.integers(0, 1 << 16), st.binary(min_size=1, max_size=80))
cuts = st.tuples(st.just("cut"), st.integers(0, 1 << 16), st.just(b""))
growths = st.tuples(st.just("grow"), st.just(0), st.binary(min_size=1, max_size=600))
edits = st.lists(st.one_of(flips, overwrites), min_size=1, max_size=6)
changes = st.lists(st.one_of(flips, overwrites, cuts, growths), min_size=1, max_size=6)


def mutated(data: bytes, mutations: list[tuple[str, int, bytes]]) -> bytes:
    result = bytearray(data)
    for kind, place, what in mutations:
        at = place % max(len(result), 1)
        if kind == "cut":
            del result[at:]
        elif kind == "grow":
            result += what
        else:
            for index, byte in enumerate(what[: len(result) - at]):
                result[at + index] = byte ^ (result[at + index] if kind == "xor" else 0)
    return bytes(result)


def of_file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


same_directory = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
