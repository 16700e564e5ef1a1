# SPDX-License-Identifier: Apache-2.0
"""vLLM's released tests of its offloading connector pass with our connector."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.upstream import suite
from tests.upstream.releases import ReleaseUnavailableError, release

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]

#: Release → tests that pass. No test is left out. The first is not among `vllm_release.KNOWN`: it
#: is served by its capabilities.
RELEASES = {"0.31.0": 471, "0.32.0": 563, "0.33.0": 653}
NEWEST = "0.33.0"
#: vLLM skips these two on any machine without a GPU, which has no attention backend for them.
NEED_A_GPU = {"test_register_kv_caches", "test_register_kv_caches_uniform_type"}
#: vLLM's tests of several KV cache groups, of windows and of states that both releases have.
SEVERAL_GROUPS = {
    "test_two_groups_full_and_sliding_window",
    "test_two_groups_different_block_sizes",
    "test_swa_alignment_skip",
    "test_aligned_boundary_store_uses_exact_source_with_partial_tail",
    "test_aligned_boundary_store_maps_sparse_group_id_to_dense_transfer_slot",
    "test_normal_store_excludes_align_mode_mamba_sources",
    "test_recurrent_group_unhashed_block_does_not_truncate_load_boundary",
    "test_stale_sliding_window_block_after_prepare_store_failure",
    "test_chunked_local_attention_reports_its_chunk_window",
    "test_request_finished_mixed_full_attn_and_sliding_window",
    "test_retention_interval_zero_stores_only_replay_boundary",
}
#: Our methods that vLLM's rig calls. The rig ends requests of several groups, and fails no load.
EXERCISED = {
    "__init__": 200,
    "on_new_request": 100,
    "get_num_new_matched_tokens": 100,
    "update_state_after_alloc": 100,
    "build_connector_meta": 1000,
    "handle_preemptions": 1000,
    "start_load_kv": 1000,
    "build_connector_worker_meta": 1000,
    "update_connector_output": 1000,
    "get_kv_connector_stats": 1000,
}


#: test_graft.py has the newest one, with our package in its tree.
@pytest.mark.parametrize("version", [version for version in RELEASES if version != NEWEST])
def test_vllms_own_tests_pass_with_our_connector(version: str, tmp_path: Path) -> None:
    try:
        tree = release(version)
    except ReleaseUnavailableError as error:
        pytest.skip(f"vLLM {version}'s own tests cannot be had: {error}")
    check(suite.run(tree, tmp_path), version)


def check(outcome: suite.Outcome, version: str) -> None:
    """The connector was ours, and all tests have passed."""
    assert not outcome.failed, outcome.output
    assert len(outcome.passed) == RELEASES[version], outcome.output
    assert _functions(outcome.skipped) == NEED_A_GPU
    assert _functions(outcome.passed) >= SEVERAL_GROUPS
    for method, count in EXERCISED.items():
        assert outcome.calls.get(method, 0) >= count, (method, outcome.calls)


def _functions(tests: list[str]) -> set[str]:
    return {name.rpartition("::")[2].partition("[")[0] for name in tests}
