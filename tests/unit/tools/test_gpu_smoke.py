# SPDX-License-Identifier: Apache-2.0
"""Tools for a GPU machine: the first stage, over the stub of its driver, whose figures mean
nothing; and libraries without the machine code of other GPUs."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.copies.fake_cuda import MODEL_STREAM, FakeCuda, working_cuda
from tests.unit.tools.gpu_tools import tool
from vllm_nvmeof_offload.units import KIB, MIB

gpu_smoke = tool("gpu_smoke")


@pytest.fixture
def working() -> Iterator[FakeCuda]:
    with working_cuda() as cuda:
        yield cuda


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_copies_of_every_arm_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    cuda, smoke = FakeCuda(), gpu_smoke.Smoke()
    gpu_smoke.report_world(smoke, cuda, 1, 2 * MIB, (4 * KIB,))
    lines = printed(capsys)
    assert not smoke.failed and not cuda.registered and not cuda.allocated
    assert lines[0]["gpu"] == "stub" and lines[1]["seconds"].keys() >= {"populate", "register"}
    rates = {line["arm"]: line["gb_per_s"] for line in lines[2:]}
    assert rates.keys() == {"dma", "dma_overlap", "kernel", "auto"}
    assert all(rate > 0 for arm in rates.values() for rate in arm.values())
    assert all(arm.keys() == {"store", "load", "both"} for arm in rates.values())


def test_an_arm_that_fails_is_named_and_the_others_are_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cuda, smoke = FakeCuda(ignore=("copy_batch",)), gpu_smoke.Smoke()
    gpu_smoke.report_world(smoke, cuda, 1, 2 * MIB, (4 * KIB,))
    lines = printed(capsys)
    assert smoke.failed
    failed = {line["step"]: line["failed"] for line in lines if "failed" in line}
    wrong = "ArithmeticError: the bytes that were copied back differ"
    assert failed["dma, 4096 bytes"] == failed["dma_overlap, 4096 bytes"] == wrong
    assert "kernel" in {line["arm"] for line in lines if "arm" in line}


def test_the_wait_behind_another_fence_is_measured(
    working: FakeCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = threading.Event()
    timer = threading.Timer(0.05, forward.set)

    def compute() -> None:
        working.on_model(lambda: forward.wait(20) and None)
        timer.start()

    gpu_smoke.report_fence(gpu_smoke.Smoke(), working, lambda: MODEL_STREAM, compute)
    timer.join()
    (line,) = printed(capsys)
    assert 0 < line["load_behind_a_pending_fence_ms"] < 1e3 * gpu_smoke.FENCE_S_MAX
    assert not working.registered and not working.allocated and not working.events


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
