# SPDX-License-Identifier: Apache-2.0
"""The checksums of stores and loads are those of the library, by the GPU and by the host."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("crc32c", reason="it is the reference")
from crc32c import crc32c

from tests.gpu.device import Device
from tests.gpu.rig import LAYOUTS, Rig
from vllm_nvmeof_offload.copy.base import Backend, Direction

#: Bytes of a block in a layer: one read of a warp and several, and more than a part.
PAGES = (1024, 2 * 576 * 16, 72 << 10)
ROUNDS = 20

backends = pytest.mark.parametrize("backend", list(Backend))


def _crc(content: np.ndarray) -> int:
    return int(crc32c(content.tobytes()))


@backends
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page", PAGES)
def test_the_crcs_of_stores_and_loads_are_those_of_the_library(
    device: Device, layout: str, backend: Backend, page: int
) -> None:
    rng = np.random.default_rng(page)
    rig = Rig(device, layout, backend, page, checksums=True)
    assert rig.engine.makes_checksums
    original = rng.integers(0, 256, rig.cache.read().size, np.uint8)
    rig.cache.write(original)
    chunks = rig.chunks(rng)
    stored = rig.payloads(chunks)
    rig.wait(rig.submit(Direction.STORE, chunks, payloads=stored))
    assert stored.crcs.tolist() == [_crc(rig.content_of(original, one)) for one, _ in chunks]
    rig.cache.write(np.zeros_like(original))
    others = [(blocks, slot) for (blocks, _), (_, slot) in zip(chunks, chunks[::-1], strict=True)]
    loaded = rig.payloads(others)
    rig.wait(rig.submit(Direction.LOAD, others, payloads=loaded))
    assert loaded.crcs.tolist() == stored.crcs.tolist()[::-1]
    rig.close()


@backends
def test_crcs_of_many_tickets_both_ways_at_once(device: Device, backend: Backend) -> None:
    """A load's checksum that did not wait for its copy would be of the bytes before."""
    rng = np.random.default_rng(7)
    rig = Rig(device, "per_layer", backend, 64 << 10, checksums=True)
    for _ in range(ROUNDS):
        original = rng.integers(0, 256, rig.cache.read().size, np.uint8)
        rig.cache.write(original)
        rig.staging[:] = rng.integers(0, 256, rig.staging.shape, np.uint8)
        chunks = rig.chunks(rng)
        half = rig.slots // 2
        expected, found, tickets = [], [], []
        for (blocks, stored), (others, loaded) in zip(chunks[:half], chunks[half:], strict=True):
            of_store, of_load = rig.payloads([(blocks, stored)]), rig.payloads([(others, loaded)])
            expected += [_crc(rig.content_of(original, blocks)), _crc(rig.payload(loaded))]
            found += [of_store.crcs, of_load.crcs]
            tickets += [
                rig.submit(Direction.STORE, [(blocks, stored)], payloads=of_store),
                rig.submit(Direction.LOAD, [(others, loaded)], payloads=of_load),
            ]
        rig.wait(*tickets)
        assert np.concatenate(found).tolist() == expected
    rig.close()


def test_a_page_that_is_no_multiple_of_512_leaves_the_checksum_to_the_cpu(device: Device) -> None:
    rig = Rig(device, "contiguous", Backend.DMA, 1000, checksums=True)
    payloads = rig.payloads([([0, 1, 2], 0)])
    rig.wait(rig.submit(Direction.STORE, [([0, 1, 2], 0)], payloads=payloads))
    if device.cuda is None:
        assert payloads.crcs.tolist() == [_crc(rig.payload(0))]
    else:
        assert payloads.crcs.tolist() == [-1]
    rig.close()
