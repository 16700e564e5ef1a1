# SPDX-License-Identifier: Apache-2.0
"""Parallel shapes: refusals, and how a replica gets its index, number and name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.vllm_adapter.supported import (
    Replica,
    count_nodes,
    note_replicas,
    refuse_parallel,
    replica_of,
)


def config(
    size: int = 1, index: int = 0, engine_id: str = "abc", *, moe: bool = False, **parallel: int
) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(is_moe=moe),
        kv_transfer_config=SimpleNamespace(engine_id=engine_id),
        parallel_config=SimpleNamespace(
            **{
                "enable_elastic_ep": False,
                "data_parallel_size": size,
                "data_parallel_size_local": size,
                "data_parallel_index": index,
                **parallel,
            }
        ),
    )


def test_the_number_of_replicas_is_taken_from_vllm_where_it_knows_it() -> None:
    extra: dict[str, Any] = {}
    note_replicas(config(), extra)
    assert extra == {}
    note_replicas(config(size=3), extra)
    # Once more, as the configuration of one replica, which vLLM has made independent.
    note_replicas(config(size=1, index=2), extra)
    assert extra == {"replicas": 3}


def test_a_number_of_replicas_that_contradicts_vllms_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^replicas=2: data_parallel_size is 3; leave"):
        note_replicas(config(size=3), {"replicas": 2})


def test_replicas_of_a_model_with_experts_share_the_sizes_as_others_do() -> None:
    """Each stays one of two, and knows its own index, because they compute in step."""
    extra: dict[str, Any] = {}
    note_replicas(config(size=2, index=1, moe=True), extra)
    assert extra == {"replicas": 2}
    one = config(size=2, index=1, engine_id="abc_dp1", moe=True)
    assert replica_of(one, 2) == Replica(1, 2, "abc")


def test_a_number_of_replicas_that_may_change_is_refused() -> None:
    refuse_parallel(config(size=2).parallel_config)
    with pytest.raises(ConfigError, match=r"^enable_elastic_ep=True: .* fixed number of replicas"):
        refuse_parallel(config(size=2, enable_elastic_ep=True).parallel_config)


def test_a_replica_knows_its_index_and_whose_ranks_are_its_siblings() -> None:
    first, second = (replica_of(config(index=i, engine_id=f"abc_dp{i}"), 2) for i in (0, 1))
    assert (first, second) == (Replica(0, 2, "abc"), Replica(1, 2, "abc"))
    assert (first.engine, second.engine) == ("abc/0", "abc/1")
    assert replica_of(config(), 1) == Replica(0, 1, "abc")
    assert Replica().engine == ""


@pytest.mark.parametrize(
    "one", [config(index=1), config(engine_id="abc_dp0"), config(size=2)],
    ids=["the second", "the first", "not made independent"],
)  # fmt: skip
def test_a_replica_that_was_not_counted_is_refused(one: Any) -> None:
    """Without our plugin the pool is not divided."""
    with pytest.raises(ConfigError, match=r"^data_parallel_size=2: .*VLLM_PLUGINS.*replicas"):
        replica_of(one, 1)


def test_more_replicas_than_were_declared_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^replicas=2: this is replica 2, counted from 0"):
        replica_of(config(index=2, engine_id="abc_dp2"), 2)


def test_memory_is_judged_by_machine() -> None:
    assert count_nodes(config().parallel_config) == 1
    assert count_nodes(config(size=4).parallel_config) == 1
    assert count_nodes(config(size=4, data_parallel_size_local=2).parallel_config) == 2
    assert count_nodes(config(data_parallel_size_local=0).parallel_config) == 1
    assert count_nodes(config(nnodes=3).parallel_config) == 3
