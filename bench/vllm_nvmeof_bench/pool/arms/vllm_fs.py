# SPDX-License-Identifier: Apache-2.0
"""vLLM's own fs tier, driven through its real manager as vLLM's scheduler drives it.

`FileSystemTierManager` with its default threads, on a two-dimensional view of the same
staging memory (one row a block, as vLLM's CPU tier gives it). Each block becomes a file: a
temporary one is written and renamed. A file that exists is not written again, so that every
write here has a new key; files of old keys are deleted between the measurements. It uses
O_DIRECT where the directory has it, and does not sync: nothing is added to its timing.

A job runs on one thread. A batch is therefore given as many jobs of 2 MiB (or one block),
which loads all its threads and spares it the cost of tiny jobs; one block a job beside reads,
so that no thread is held for long. Batches are waited for with its own `drain_jobs`; it has
nothing to wait on for single jobs, so those are polled for every 0.2 ms.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_nvmeof_bench.pool.arms.base import Job
from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_offload.units import MIB

if TYPE_CHECKING:
    from vllm_nvmeof_offload.staging import Staging

__all__ = ["FsMover", "describe", "import_tier"]

_POLL_S = 0.0002
_JOB_BYTES = 2 * MIB


def import_tier() -> Any:
    """Import vLLM's module of the tier, quietly.

    Raises:
        BenchError: this vLLM has none, or there is no vLLM.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            from vllm.v1.kv_offload.tiering.fs import manager
    except ImportError as error:
        raise BenchError(f"vLLM's fs tier cannot be imported ({error})") from None
    return manager


def describe() -> dict[str, Any]:
    """What of the tier is active, for `conditions`."""
    manager = import_tier()
    from vllm.v1.kv_offload.tiering.fs import io as fs_io

    defaults = manager.FileSystemTierManager.__init__.__kwdefaults__ or {}
    code = manager.FileSystemTierManager.__init__.__code__
    names = code.co_varnames[: code.co_argcount]
    values = manager.FileSystemTierManager.__init__.__defaults__ or ()
    defaults = {**dict(zip(names[-len(values) :], values, strict=True)), **defaults}
    return {
        "c_extension": bool(fs_io._HAS_FSIO_C),
        "read_threads": defaults.get("n_read_threads"),
        "write_threads": defaults.get("n_write_threads"),
        "job_bytes_in_batches": _JOB_BYTES,
    }


class FsMover:
    """Implements `arms.base.Mover`."""

    batch_job_bytes: int | None = _JOB_BYTES

    def __init__(self, directory: Path, block_bytes: int, blocks: int, staging: Staging) -> None:
        self._manager_module = import_tier()
        self._directory = directory
        self._generation = 0
        self._jobs = 0
        self._job_of: dict[int, int] = {}
        #: The key under which each block lies on disk; of writes, from before they begin.
        self._keys: dict[int, bytes] = {}
        self._new_keys: dict[int, bytes] = {}
        self._stale: list[bytes] = []
        self._view = staging.view[: blocks * block_bytes].cast("B", [blocks, block_bytes])
        self._tier = self._manager_module.FileSystemTierManager(
            _spec(), self._view, "fs", str(directory)
        )
        self._context = _request()

    @property
    def direct(self) -> bool:
        """True if the tier found O_DIRECT to work; else its reads would be of the page cache."""
        return bool(self._tier._use_o_direct)

    def prepare(self, jobs: Sequence[Job]) -> None:
        missing = [b for job in jobs if job.is_read for b in job.blocks if b not in self._keys]
        if missing:
            step = max(1, _JOB_BYTES // self._view.strides[0])  # type: ignore[index]
            parts = [missing[at : at + step] for at in range(0, len(missing), step)]
            writes = [Job(number, False, part) for number, part in enumerate(parts)]
            self._name(writes)
            self.run(writes)
        self._name([job for job in jobs if not job.is_read])

    def _name(self, writes: Sequence[Job]) -> None:
        self._generation += 1
        for job in writes:
            for block in job.blocks:
                self._new_keys[block] = _key(block, self._generation)

    def run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._submit(job)
        self._tier.drain_jobs()
        count = len(self._finished())
        if count != len(jobs):
            raise BenchError(f"vLLM's fs tier finished {count} of {len(jobs)} jobs")

    def submit(self, job: Job) -> None:
        if not job.is_read:
            self._name([job])
        self._submit(job)

    def _submit(self, job: Job) -> None:
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._jobs += 1
        self._job_of[self._jobs] = job.token
        transfer = TransferJob(
            job_id=self._jobs,
            keys=[self._key_for(block, job.is_read) for block in job.blocks],
            chunk_ids=np.asarray(job.blocks, np.int32),
            is_promotion=job.is_read,
            req_context=self._context,
        )
        if job.is_read:
            self._tier.submit_load(transfer)
        else:
            self._tier.submit_store(transfer)

    def _key_for(self, block: int, is_read: bool) -> bytes:
        if is_read:
            return self._keys[block]
        old = self._keys.get(block)
        if old is not None:
            self._stale.append(old)
        self._keys[block] = self._new_keys.pop(block)
        return self._keys[block]

    def poll(self, timeout_s: float) -> list[int]:
        end_s = time.perf_counter() + timeout_s
        while not (finished := self._finished()) and time.perf_counter() < end_s:
            time.sleep(_POLL_S)
        return finished

    def _finished(self) -> list[int]:
        finished = []
        for result in self._tier.get_finished_jobs():
            if not result.success:
                raise BenchError("vLLM's fs tier: a job failed")
            finished.append(self._job_of.pop(result.job_id))
        return finished

    def tidy(self) -> bool:
        """Delete the files of old keys; nothing may be in flight."""
        stale, self._stale = self._stale, []
        for key in stale:
            path = self._tier.file_mapper.get_file_name(key)
            os.unlink(path)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(path))
        return bool(stale)

    def close(self) -> None:
        self._tier.shutdown()
        self._view.release()


def _key(block: int, generation: int) -> bytes:
    from vllm.v1.kv_offload.base import make_offload_key

    digest = hashlib.sha256(f"{block}:{generation}".encode()).digest()
    return bytes(make_offload_key(digest, 0))


def _request() -> Any:
    from vllm.v1.kv_offload.base import ReqContext

    return ReqContext(req_id="bench")


def _spec() -> Any:
    """A real `OffloadingSpec` of one group on one rank; only its configuration is used."""
    from vllm.v1.kv_offload import config as fields
    from vllm.v1.kv_offload.base import OffloadingSpec

    class Spec(OffloadingSpec):  # type: ignore[misc]
        def get_manager(self) -> Any:
            raise AssertionError("not used")

        def get_worker(self, kv_caches: Any) -> Any:
            raise AssertionError("not used")

    return Spec(
        fields.OffloadingConfig(
            groups=(fields.OffloadingGroupConfig(16, ("layer",), 0),),
            worker_kv_bytes_per_block=1,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="bench",
            model=fields.OffloadingModelConfig(name="bench", dtype="bfloat16"),
            cache=fields.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=fields.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
    )
