# SPDX-License-Identifier: Apache-2.0
"""One run of benchmarks of servers: start or reach them, measure, say under which conditions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.bar import OnProgress
from vllm_nvmeof_bench.home import drop_logs, home_in, quiet_interpreter
from vllm_nvmeof_bench.serve.arms import Arm, Sizes
from vllm_nvmeof_bench.serve.fleet import ServeFleet, conditions_of
from vllm_nvmeof_bench.serve.prompts import Tokens
from vllm_nvmeof_offload.units import MIB

__all__ = ["REMOTE_TOKENS", "merged", "run"]

#: Ids that nearly every model's vocabulary has, none of them special.
REMOTE_TOKENS = Tokens(1000, 30000)


def run(
    parts: Mapping[str, tuple[Any, Any]],
    arms: Sequence[Arm],
    tokens: Tokens | None,
    directory: Path,
    logs: Path,
    keep: Callable[[str, list[Any], dict[str, Any]], None],
    on_progress: OnProgress = lambda done, total, what: None,
) -> None:
    """Measure each part on the same servers; `keep` gets its name, samples and conditions.

    Of a part that is cut off it gets what there is, and `cut_off` in the conditions.

    parts: by name, a module with `measure`, such as `ttft`, and its settings. tokens: of the
    prompts; None: by the arms. logs: of servers started here; they stay if it fails.

    Raises:
        BenchError: too little space, a server that does not start or answer.
    """
    sizes = merged([settings.sizes() for _, settings in parts.values()])
    started = any(arm.url is None for arm in arms)
    tokens = tokens or (Tokens(high=sizes.shape.vocab) if started else REMOTE_TOKENS)
    with home_in(directory, _disk_bytes(arms, sizes)) as home, quiet_interpreter():
        common = {**conditions_of(arms, sizes, home), "token_ids": [tokens.low, tokens.high]}
        with ServeFleet(arms, sizes, home, logs, _telling(on_progress)) as fleet:
            models = {name: fleet.run(one.model()) for name, one in fleet.clients.items()}
            for name, (bench, settings) in parts.items():
                own = {**common, "models": models, "settings": asdict(settings)}
                own["load_average_at_start"] = _load()
                samples: list[Any] = []
                try:
                    own |= bench.measure(fleet, settings, tokens, samples, on_progress)
                except BaseException:
                    own["cut_off"] = True
                    raise
                finally:
                    if samples:  # what was measured is not lost with what was not
                        keep(name, samples, {**own, "load_average_at_end": _load()})
    drop_logs(logs, [arm.name for arm in arms if arm.url is None])


def merged(sizes: Sequence[Sizes]) -> Sizes:
    """Of servers on which several parts run: the largest of each."""
    names = ("working_tokens", "request_tokens_max", "gpu_tokens", "max_num_seqs")
    largest = {name: max(getattr(one, name) for one in sizes) for name in names}
    return replace(sizes[0], **largest, third_tokens=max(one.tokens_of("third") for one in sizes))


def _load() -> list[float]:
    return [round(value, 2) for value in os.getloadavg()]


def _telling(on_progress: OnProgress) -> Any:
    return lambda what: on_progress(0, 0, what)


def _disk_bytes(arms: Sequence[Arm], sizes: Sizes) -> int:
    pools = sum(arm.pool for arm in arms)
    return pools * sizes.pool_bytes + 256 * MIB if pools else 0
