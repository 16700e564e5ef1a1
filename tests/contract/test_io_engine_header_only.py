# SPDX-License-Identifier: Apache-2.0
"""The contract of reads that check the header alone: whoever copies the payload can check it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from crc32c import crc32c

from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, OK, STALE
from vllm_nvmeof_offload.io.base import Completion
from vllm_nvmeof_offload.units import HEADER_BYTES

from .rig import PAYLOAD_BYTES, Rig, content, name

MakeRig = Callable[..., Rig]


def _crc(number: int) -> int:
    return crc32c(content(name(number)))


def test_an_intact_slot_names_the_checksum_of_its_payload(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.store(3, name(1))
    (found,) = rig.run(rig.read(3, 1, name(1), header_only=True))
    assert found == Completion(rig.tokens, OK, payload_crc=_crc(1))
    assert rig.payload(1) == content(name(1))


@pytest.mark.parametrize("at", [HEADER_BYTES, HEADER_BYTES + PAYLOAD_BYTES - 1])
def test_a_damaged_payload_is_left_to_its_copy(make_rig: MakeRig, at: int) -> None:
    rig = make_rig()
    rig.store(3, name(1))
    rig.damage(3, at)
    (found,) = rig.run(rig.read(3, 1, name(1), header_only=True))
    assert found == Completion(rig.tokens, OK, payload_crc=_crc(1))
    assert crc32c(rig.payload(1)) != _crc(1)


@pytest.mark.parametrize("at", [0, 20, 4095])
def test_a_damaged_header_is_detected(make_rig: MakeRig, at: int) -> None:
    rig = make_rig()
    rig.store(3, name(1))
    rig.damage(3, at)
    found = rig.run(rig.read(3, 1, name(1), header_only=True))
    assert found == [Completion(rig.tokens, CHECKSUM_MISMATCH)]


def test_an_intact_slot_of_another_identity_or_length_is_stale(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.store(3, name(1))
    reads = [
        rig.read(3, 1, name(2), header_only=True),
        rig.read(3, 2, name(1, generation=2), header_only=True),
        rig.read(3, 3, name(1), payload_bytes=PAYLOAD_BYTES - 1, header_only=True),
    ]
    assert [(one.outcome, one.payload_crc) for one in rig.run(*reads)] == [(STALE, None)] * 3


def test_a_slot_that_was_never_written_proves_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    found = rig.run(rig.read(9, 0, name(1), header_only=True))
    assert found == [Completion(rig.tokens, CHECKSUM_MISMATCH)]


def test_other_reads_check_the_payload(make_rig: MakeRig) -> None:
    """Beside one of the same slot that does not."""
    rig = make_rig()
    rig.store(3, name(1))
    rig.damage(3, HEADER_BYTES + 100)
    alone, whole = rig.run(rig.read(3, 1, name(1), header_only=True), rig.read(3, 2, name(1)))
    assert whole.outcome == CHECKSUM_MISMATCH
    assert alone.outcome == OK
