# SPDX-License-Identifier: Apache-2.0
"""What must be reached, from medians over rounds; the worst size, count and direction decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_nvmeof_bench.gpu.samples import Sample, median_of
from vllm_nvmeof_offload.units import KIB, format_bytes

__all__ = ["Row", "evaluate"]

_LARGE = 512 * KIB
_Key = tuple[str, str, int, int]  # case, direction, bytes of a block, blocks


@dataclass(frozen=True)
class Row:
    """measured: None: nothing to compute it from. where: what decided."""

    target: str
    required: str
    measured: float | None
    reached: bool | None
    where: str = ""


def evaluate(samples: Sequence[Sample]) -> list[Row]:
    """In the order of the requirements."""
    keys = sorted({(s.case, s.direction, s.block_bytes, s.count) for s in samples})
    large = [key for key in keys if key[0] == "transfer" and key[2] >= _LARGE]
    choices = [key for key in keys if key[0] in ("transfer", "few")]
    both = [key for key in keys if key[0] == "both" and key[1] == "both"]
    rows = [
        _worst("DMA of blocks ≥ 512 KiB / one contiguous copy", 0.97, large,
               lambda key: _ratio(_value(samples, key, "dma"), _value(samples, key, "contiguous"))),
        _worst("both directions at once / one direction, 2 MiB", 1.6, both,
               lambda key: _both(samples, key)),
        _worst("auto / the better of DMA and kernel", 0.95, choices,
               lambda key: _ratio(_value(samples, key, "auto"), _better(samples, key))),
        _worst("bf16 matrix products beside copies by DMA / alone", 0.97,
               [("loop_matrix", "both", 0, 0)],
               lambda key: _ratio(_value(samples, key, "dma"), _value(samples, key, "alone"))),
    ]  # fmt: skip
    took = median_of(samples, case="submit")
    reached = None if took is None else took <= 50
    return [*rows, Row("host time to submit 1000 blocks", "≤ 50 µs", took, reached)]


def _worst(
    target: str, limit: float, keys: Iterable[_Key], ratio: Callable[[_Key], float | None]
) -> Row:
    found = [(value, key) for key in keys if (value := ratio(key)) is not None]
    if not found:
        return Row(target, f"≥ {limit}", None, None)
    value, (_, direction, size, count) = min(found)
    where = f"{count} × {format_bytes(size)}, {direction}" if count else direction
    return Row(target, f"≥ {limit}", round(value, 3), value >= limit, where)


def _value(samples: Sequence[Sample], key: _Key, arm: str) -> float | None:
    case, direction, size, count = key
    wanted = {"case": case, "direction": direction, "block_bytes": size, "count": count}
    return median_of(samples, arm=arm, **wanted)


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _better(samples: Sequence[Sample], key: _Key) -> float | None:
    rates = _value(samples, key, "dma"), _value(samples, key, "kernel")
    known = [rate for rate in rates if rate is not None]
    return max(known) if len(known) == len(rates) else None


def _both(samples: Sequence[Sample], key: _Key) -> float | None:
    """Against the mean of the two directions, each alone."""
    case, _, size, count = key
    alone = [_value(samples, (case, one, size, count // 2), "dma") for one in ("store", "load")]
    known = [rate for rate in alone if rate is not None]
    mean = sum(known) / 2 if len(known) == 2 else None
    return _ratio(_value(samples, key, "dma"), mean)
