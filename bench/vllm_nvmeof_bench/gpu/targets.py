# SPDX-License-Identifier: Apache-2.0
"""What must be reached, from medians over rounds; the worst size, count and direction decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from vllm_nvmeof_bench.gpu.samples import Sample, median_of
from vllm_nvmeof_bench.pool.targets import Row
from vllm_nvmeof_offload.copy.select import KERNEL_MARGIN
from vllm_nvmeof_offload.units import KIB, format_bytes

__all__ = ["evaluate"]

_LARGE = 512 * KIB
_SMALL = (16 * KIB, 64 * KIB)
_Key = tuple[str, str, int, int]  # case, direction, bytes of a block, blocks


def evaluate(samples: Sequence[Sample]) -> list[Row]:
    """In the order of the requirements; `where` says what decided."""
    keys = sorted({(s.case, s.direction, s.block_bytes, s.count) for s in samples})
    transfers = [key for key in keys if key[0] == "transfer"]
    large = [key for key in transfers if key[2] >= _LARGE]
    small = [key for key in transfers if _SMALL[0] <= key[2] <= _SMALL[1]]
    choices = [key for key in keys if key[0] in ("transfer", "few")]
    both = [key for key in keys if key[0] == "both" and key[1] == "both"]
    loops = [("loop_matrix", "both", 0, 0)]

    def over(above: str, below: str) -> Callable[[_Key], float | None]:
        return lambda key: _ratio(_value(samples, key, above), _value(samples, key, below))

    rows = [
        _worst(
            Row("DMA of blocks ≥ 512 KiB / one contiguous copy", True, 0.97),
            samples, large, over("dma", "contiguous"),
        ),
        _worst(
            Row("both directions at once / one direction, 2 MiB", True, 1.6),
            samples, both, lambda key: _both(samples, key),
        ),
        _worst(
            Row(f"auto / the better of DMA and kernel ÷ {KERNEL_MARGIN:g}", True, 0.95),
            samples, choices,
            lambda key: _ratio(_value(samples, key, "auto"), _better(samples, key)),
        ),
        _worst(
            Row("auto / vLLM's own code, 16 to 64 KiB", True, 1.0),
            samples, small, over("auto", "vllm"),
        ),
        _worst(
            Row("bf16 matrix products beside copies by DMA / alone", True, 0.97),
            samples, loops, over("dma", "alone"),
        ),
    ]  # fmt: skip
    submits = [key for key in keys if key[0] == "submit"]
    took = [(value, key) for key in submits if (value := _value(samples, key, "dma")) is not None]
    row = Row("host time to submit 1000 blocks", False, 50, " µs")
    if took:
        value, key = max(took)
        row = replace(row, measured=value, n=_count(samples, key), where=_where(key))
    return [*rows, row]


def _worst(
    row: Row, samples: Sequence[Sample], keys: Iterable[_Key], ratio: Callable[[_Key], float | None]
) -> Row:
    found = [(value, key) for key in keys if (value := ratio(key)) is not None]
    if not found:
        return row
    value, key = min(found)
    return replace(row, measured=value, n=_count(samples, key), where=_where(key))


def _where(key: _Key) -> str:
    _, direction, size, count = key
    return f"{count} × {format_bytes(size)}, {direction}" if count else direction


def _count(samples: Sequence[Sample], key: _Key) -> int:
    """Rounds."""
    return len({s.round for s in samples if (s.case, s.direction, s.block_bytes, s.count) == key})


def _value(samples: Sequence[Sample], key: _Key, arm: str) -> float | None:
    case, direction, size, count = key
    wanted = {"case": case, "direction": direction, "block_bytes": size, "count": count}
    return median_of(samples, arm=arm, **wanted)


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _better(samples: Sequence[Sample], key: _Key) -> float | None:
    """`auto` leaves DMA only for a kernel that is `KERNEL_MARGIN` times as fast: read likewise."""
    dma, kernel = _value(samples, key, "dma"), _value(samples, key, "kernel")
    if dma is None or kernel is None:
        return None
    return max(dma, kernel / KERNEL_MARGIN)


def _both(samples: Sequence[Sample], key: _Key) -> float | None:
    """Against the mean of the two directions, each alone."""
    case, _, size, count = key
    alone = [_value(samples, (case, one, size, count // 2), "dma") for one in ("store", "load")]
    known = [rate for rate in alone if rate is not None]
    mean = sum(known) / 2 if len(known) == 2 else None
    return _ratio(_value(samples, key, "dma"), mean)
