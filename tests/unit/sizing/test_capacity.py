# SPDX-License-Identifier: Apache-2.0
"""Capacity of each tier and the time of a reload: computed by hand, and as properties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_nvmeof_offload.commands.size.deployment import Deployment
from vllm_nvmeof_offload.commands.size.kv import KvSizes
from vllm_nvmeof_offload.commands.size.model import Weights, preset, preset_names
from vllm_nvmeof_offload.commands.size.report import build
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.ownership import PoolSpec
from vllm_nvmeof_offload.staging import split_slots

KIB, GIB = 1 << 10, 1 << 30
#: Llama 3.1 8B, 32k tokens: 2048 chunks of 2 MiB, 4 GiB; with headers 2048 × 2052 KiB.
CHUNKS, SLOT = 2048, 2052 * KIB


def sized(name: str = "Llama-3.1-8B-Instruct", **more: Any) -> tuple[KvSizes, Deployment]:
    deployment = Deployment(**more)
    return KvSizes(preset(name, Weights(16 * GIB, "given")), deployment), deployment


def test_gpu_memory_by_hand() -> None:
    sizes, _ = sized(gpus=2, gpu_memory_utilization=0.9)
    room = sizes.gpu_room()
    assert room is not None
    assert room.free_bytes == 72 * GIB - 4 * GIB - 16 * GIB
    assert room.session_bytes == 4 * GIB
    assert room.sessions == 2 * 13


def test_weights_that_do_not_fit_are_reported_and_leave_no_room() -> None:
    report = build(preset("DeepSeek-V3"), Deployment())
    assert any("weights do not fit" in note for note in report.notes)
    (sessions,) = (f for f in report.figures if f.name == "sessions in GPU memory")
    assert sessions.value == 0


def test_the_cpu_tier_is_the_servers() -> None:
    sizes, deployment = sized(staging_bytes=64 * GIB)
    cache_slots, streams = split_slots(64 * GIB, SLOT, deployment.stream_slots)
    assert streams == 64
    room = sizes.cpu_room()
    assert room.free_bytes == cache_slots * SLOT
    assert room.sessions == cache_slots // CHUNKS == 15


def test_the_pool_by_hand() -> None:
    sizes, _ = sized(drive_bytes=10**13, drive_fill=0.5)
    session = CHUNKS * (SLOT + 64)
    room = sizes.pool_room(24)
    assert room.session_bytes == session
    assert sizes.pool_room(1).sessions == 5 * 10**12 // session
    assert room.sessions == 12 * 10**13 // session


def test_the_reload_by_hand() -> None:
    sizes, _ = sized(
        concurrency=10, ttft_seconds=4.0, drive_read_bytes_per_s=5e9, link="3x100GbE",
        link_efficiency=0.8,
    )  # fmt: skip
    back = sizes.plan_reload(6)
    assert back.session_bytes == CHUNKS * SLOT
    assert back.needed_bytes_per_s == 10 * CHUNKS * SLOT / 4
    rates = {hop.name: hop.bytes_per_s for hop in back.hops}
    assert rates["drives"] == 30e9
    assert rates["links"] == pytest.approx(3 * 12.5e9 * 0.8)
    assert rates["GPU links"] == pytest.approx(0.8 * 32e9 * 16 / 8 * 128 / 130)
    # 10.76 GB/s: 3 drives of 5 GB/s, 2 links of 10.
    assert [hop.needed for hop in back.hops[:2]] == [3, 2]
    assert back.seconds == pytest.approx(10 * CHUNKS * SLOT / 30e9)
    assert back.sessions_in_time == int(4 * 30e9 / (CHUNKS * SLOT))


@pytest.mark.parametrize(
    ("more", "bottleneck"),
    [
        ({"drives": 1, "link": "8x400GbE"}, "drives"),
        ({"drives": 24, "link": "100GbE"}, "links"),
        ({"drives": 24, "link": "8x400GbE", "gpu_link": "pcie4x4"}, "GPU links"),
    ],
)
def test_the_bottleneck_is_named(more: dict[str, Any], bottleneck: str) -> None:
    report = build(preset("Qwen3-8B"), Deployment(ttft_seconds=0.01, **more))
    assert report.bottleneck == bottleneck
    assert not report.meets_ttft
    assert any(f"the {bottleneck} are too slow" in note for note in report.notes)


def test_gpus_that_make_no_engine_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--gpus=6: .* give a multiple, such as 8"):
        build(preset("Qwen3-8B"), Deployment(gpus=6, tensor_parallel=4))


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_can_be_sized(name: str) -> None:
    report = build(preset(name), Deployment(gpus=8, tensor_parallel=8))
    assert all(figure.formula and figure.text for figure in report.figures)
    assert [row.drives for row in report.scaling] == [1, 6, 12, 24]


deployments = st.fixed_dictionaries(
    {
        "context_tokens": st.integers(1, 1 << 20),
        "concurrency": st.integers(1, 1024),
        "drives": st.integers(1, 96),
        "ttft_seconds": st.floats(0.01, 60),
        "tensor_parallel": st.sampled_from([1, 2, 4, 8]),
        "staging_bytes": st.integers(0, 1 << 40),
        "block_tokens": st.sampled_from([16, 32, 64]),
    }
)
MORE = {"context_tokens": 1 << 12, "concurrency": 7, "drives": 3, "ttft_seconds": 1.5}


@given(st.sampled_from(preset_names()), deployments, st.sampled_from(sorted(MORE)))
def test_every_figure_is_monotone_in_its_inputs(
    name: str, given_: dict[str, Any], changed: str
) -> None:
    given_["gpus"] = given_["tensor_parallel"]
    less = build(preset(name), Deployment(**given_))
    more = build(preset(name), Deployment(**{**given_, changed: given_[changed] + MORE[changed]}))
    a, b = ({f.name: f.value for f in report.figures} for report in (less, more))
    longer = changed == "context_tokens"
    if longer:
        assert b["session, made once"] >= a["session, made once"]
        assert b["session in the pool"] >= a["session in the pool"]
        for place in ("in GPU memory", "in the CPU tier", "per drive", "per enclosure"):
            # A context shorter than a chunk stores nothing, and is counted as no session.
            if a["session in the pool"]:
                assert b[f"sessions {place}"] <= a[f"sessions {place}"]
    if changed in ("context_tokens", "concurrency"):
        assert b["needed for the TTFT"] >= a["needed for the TTFT"]
        assert b["time to load them all"] >= a["time to load them all"]
        assert not more.meets_ttft or less.meets_ttft
    if changed == "drives":
        assert b["sessions per enclosure"] >= a["sessions per enclosure"]
        assert b["time to load them all"] <= a["time to load them all"]
    if changed == "ttft_seconds":
        assert b["needed for the TTFT"] <= a["needed for the TTFT"]
        assert b["sessions at once in the TTFT"] >= a["sessions at once in the TTFT"]


def test_settings_by_hand() -> None:
    sizes, deployment = sized(
        concurrency=3, users=10, daily_tokens=65536, drives=4, drive_bytes=10**12, drive_fill=0.5,
        drive_read_bytes_per_s=50e9,
    )  # fmt: skip
    advice = sizes.advise(sizes.plan_reload(4))
    assert advice is not None
    assert advice.staging_bytes == (3 * CHUNKS + deployment.stream_slots) * SLOT
    assert (advice.targets, advice.drives_needed) == (1, 1)
    written = 2 * 10 * CHUNKS * (SLOT + 64)
    assert advice.written_bytes_per_day == written
    assert advice.drive_writes_per_day == pytest.approx(written / 10**12)


@given(st.sampled_from(preset_names()), deployments, st.integers(1, 5000))
def test_the_recommended_sizes_hold_the_sessions(
    name: str, given_: dict[str, Any], users: int
) -> None:
    given_["gpus"] = 2 * given_["tensor_parallel"]
    deployment = Deployment(**given_, users=users)
    sizes = KvSizes(preset(name), deployment)
    advice = sizes.advise(sizes.plan_reload(deployment.drives))
    slots = sizes.session_slots(deployment.context_tokens)
    each, stride = sum(one.count for one in slots), slots[0].stride_bytes
    if advice is None:
        assert not each
        return
    # What a server makes of them: `split_slots`, and the slots of `PoolSpec`.
    cached, _ = split_slots(
        advice.staging_bytes // deployment.ranks, stride, deployment.stream_slots
    )
    needed = -(-deployment.concurrency // deployment.engines) * each
    assert needed <= cached <= needed + 1
    payload = max(one.payload_bytes for one in slots)
    pool = PoolSpec(
        targets=tuple(Path(str(n)) for n in range(advice.targets)),
        pool_bytes=advice.pool_bytes // deployment.ranks,
        payload_bytes=payload,
        keyspace=Keyspace.of({}),
    )
    needed = -(-users // deployment.engines) * each
    assert needed <= pool.slots_per_target * advice.targets < needed + 2 * advice.targets


def test_computing_is_compared_with_loading() -> None:
    def at(rate: float | None) -> tuple[bool | None, dict[str, float], list[str]]:
        report = build(preset("Qwen3-8B"), Deployment(prefill_tokens_per_s=rate, concurrency=4))
        return report.loads_faster, {f.name: f.value for f in report.figures}, report.notes

    unknown, figures, notes = at(None)
    assert unknown is None
    assert "gain of loading" not in figures
    assert any("--prefill-tokens-per-s" in note for note in notes)
    even = figures["as fast as loading at"]
    assert even * figures["time to load them all"] == pytest.approx(4 * 32768)
    faster, figures, notes = at(even / 2)
    assert faster
    assert figures["gain of loading"] == pytest.approx(2)
    assert not any("prefill" in note or "admission" in note for note in notes)
    faster, figures, notes = at(even * 2)
    assert faster is False
    assert figures["gain of loading"] == pytest.approx(0.5)
    assert any("admission" in note for note in notes)


@given(st.sampled_from(preset_names()), st.integers(16, 1 << 18), st.sampled_from([1, 2, 8]))
def test_slots_hold_their_chunks_and_waste_little(name: str, tokens: int, tp: int) -> None:
    deployment = Deployment(tensor_parallel=tp)
    sizes = KvSizes(preset(name), deployment)
    slots = sizes.session_slots(tokens)
    (stride,) = {slot.stride_bytes for slot in slots}
    largest = max(slot.payload_bytes for slot in slots)
    assert largest + 4096 <= stride <= largest + 2 * 4096
    assert stride % 4096 == 0
