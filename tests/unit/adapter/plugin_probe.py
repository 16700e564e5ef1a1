# SPDX-License-Identifier: Apache-2.0
"""test_plugin.py runs this in a separate process: importing vLLM takes many seconds, and the plugin
changes it permanently. So vLLM is imported once, and each thing that needs it untouched runs in a
fork. Prints one JSON object: for each case the resulting configuration or error.

Usage: plugin_probe.py MODEL_DIRECTORY SCRATCH_DIRECTORY
"""

from __future__ import annotations

import abc
import copy
import functools
import importlib
import json
import logging
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

FIELDS = (
    "kv_connector",
    "kv_connector_module_path",
    "kv_role",
    "kv_load_failure_policy",
    "kv_connector_extra_config",
)

#: What the forks would import one after the other.
IMPORTED_ONCE = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama",
)


class Probe:
    """Builds engine configurations the way `vllm serve` and `LLM` do."""

    def __init__(self, model: str, pool: str) -> None:
        self.base = {
            "model": model,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
        }
        self.pool = pool
        self.lines: list[str] = []
        # A filter, because vLLM's own logging set-up removes handlers of the loggers below it.
        logging.getLogger("vllm.nvmeof_offload").addFilter(self.remember)

    def remember(self, record: logging.LogRecord) -> bool:
        self.lines.append(record.getMessage())
        return True

    def describe(self, build: Any) -> dict[str, Any]:
        """The KV transfer configuration that `build()` makes, and its log lines."""
        self.lines.clear()
        try:
            config = build()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the case under test
            return {"error": f"{type(error).__name__}: {error}"}
        transfer = config.kv_transfer_config
        found = {name: getattr(transfer, name) for name in FIELDS} if transfer else {}
        return {**found, "log": list(self.lines)}

    def cli(self, *arguments: str) -> dict[str, Any]:
        """Build as `vllm serve` with these arguments does."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
        line = [f"--{name.replace('_', '-')}" for name in ("skip_tokenizer_init", "enforce_eager")]
        for name in ("model", "load_format", "dtype"):
            line += [f"--{name.replace('_', '-')}", str(self.base[name])]

        def build() -> Any:
            found = AsyncEngineArgs.from_cli_args(parser.parse_args([*line, *arguments]))
            return found.create_engine_config()

        return self.describe(build)

    def api(self, **arguments: Any) -> dict[str, Any]:
        """Build as `LLM(…)` with these arguments does."""
        from vllm.engine.arg_utils import EngineArgs

        return self.describe(lambda: EngineArgs(**self.base, **arguments).create_engine_config())

    def on_a_full_machine(self) -> dict[str, Any]:
        """A new configuration; and one that was made before, completed again as in an engine that
        has started: its staging and its pool fill the machine."""
        from vllm.engine.arg_utils import EngineArgs

        from vllm_nvmeof_offload.errors import ConfigError
        from vllm_nvmeof_offload.targets import configured

        def refuse(*_: object) -> None:
            raise ConfigError("staging_bytes", "all", "the machine is full")

        def build() -> Any:
            return EngineArgs(**self.base, kv_offloading_backend="nvmeof").create_engine_config()

        def again() -> Any:
            made.__post_init__()
            return made

        made = build()
        with mock.patch.object(configured, "check_memory_left", refuse):
            return {"new": self.describe(build), "again": self.describe(again)}

    def transfer(self, extra: dict[str, Any] | None = None, **fields: Any) -> tuple[str, str]:
        """A --kv-transfer-config with `extra`; the pool goes to the test's directory."""
        extra = {"targets": self.pool, **(extra or {})}
        return "--kv-transfer-config", json.dumps({**fields, "kv_connector_extra_config": extra})


def probe_cost() -> dict[str, Any]:
    """What the plugin costs a server that does not use it."""
    import vllm.engine.arg_utils as arg_utils

    arg_utils.get_kwargs(arg_utils.CacheConfig)
    modules, start = set(sys.modules), time.process_time()
    from vllm_nvmeof_offload import plugin

    plugin.register()
    seconds = time.process_time() - start
    return {"cpu_seconds": seconds, "modules_added": sorted(set(sys.modules) - modules)}


def probe(run: Probe) -> dict[str, Any]:
    import vllm.engine.arg_utils as arg_utils
    from vllm.config import KVTransferConfig

    from vllm_nvmeof_offload import plugin

    # Made before the plugin is there, as LLM(kv_transfer_config={…}) does.
    early = KVTransferConfig(kv_connector="NVMeoFOffloadingConnector", kv_role="kv_both")
    # Lay out the arguments once without the plugin: it must cope with vLLM's cached table.
    arg_utils.get_kwargs(arg_utils.CacheConfig)
    plugin.register()
    wrapped = arg_utils.VllmConfig._post_init_kv_transfer_config
    plugin.register()
    ours = {"kv_connector": "NVMeoFOffloadingConnector", "kv_role": "kv_both"}
    stock = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    backend = ("--kv-offloading-backend", "nvmeof")
    size = ("--kv-offloading-size", "1")

    return {
        "choices": list(
            arg_utils.get_kwargs(arg_utils.CacheConfig)["kv_offloading_backend"]["choices"]
        ),
        "wrapped_once": wrapped is arg_utils.VllmConfig._post_init_kv_transfer_config,
        "early_policy": copy.deepcopy(early).kv_load_failure_policy,
        "pickled_policy": type(
            pickle.loads(pickle.dumps(KVTransferConfig())).kv_load_failure_policy
        ).__name__,
        "flag": run.cli(*backend, *size, *run.transfer()),
        "flag_underscored": run.cli("--kv_offloading_backend", "nvmeof", *size, *run.transfer()),
        "flag_no_size": run.cli(*backend, *run.transfer()),
        "flag_no_json": run.cli(*backend, *size),
        "api": run.api(kv_offloading_backend="nvmeof", kv_offloading_size=1),
        "full_machine": run.on_a_full_machine(),
        "api_early_json": run.api(kv_transfer_config=early),
        "json_wins": run.cli(*backend, *size, *run.transfer({"staging_bytes": "2GiB"})),
        "json_ours": run.cli(*run.transfer(**ours)),
        "json_ours_and_size": run.cli(*size, *run.transfer(**ours)),
        "json_stock": run.cli(*run.transfer({"spec_name": "NVMeoFOffloadingSpec"}, **stock)),
        "json_fail": run.cli(*run.transfer(**ours, kv_load_failure_policy="fail")),
        "prompt_only": run.cli(*backend, *size, *run.transfer({"offload_prompt_only": True})),
        "other_connector": run.cli(*backend, *run.transfer(kv_connector="X", kv_role="kv_both")),
        "unknown_key": run.cli(*backend, *run.transfer({"targts": "/x"})),
        "wrong_type": run.cli(*backend, *run.transfer({"store_threshold": "8"})),
        "tiny_pool": run.cli(*backend, *run.transfer({"pool_bytes": "4KiB"})),
        "tiny_staging": run.cli(*backend, *run.transfer({"staging_bytes": "4KiB"})),
        "huge_size": run.cli(*backend, "--kv-offloading-size", "1e9"),
        "negative_size": run.cli(*backend, "--kv-offloading-size", "-1"),
        "bad_target": run.cli(*backend, *run.transfer({"targets": "/proc/x"})),
        "none": run.cli(),
        "native": run.cli("--kv-offloading-backend", "native", *size),
        "native_no_size": run.cli("--kv-offloading-backend", "native"),
        "lmcache": run.api(kv_offloading_backend="lmcache"),
        "stock_cpu": run.cli(
            "--kv-transfer-config",
            json.dumps({**stock, "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30}}),
        ),
    }


def probe_combined(run: Probe) -> dict[str, Any]:
    """As one of several, and in combinations that cannot be; the plugin is there already."""
    ours = {"kv_connector": "NVMeoFOffloadingConnector", "kv_role": "kv_both"}
    backend = ("--kv-offloading-backend", "nvmeof")
    size = ("--kv-offloading-size", "1")

    def combined(
        *others: dict[str, Any], by: str = "MultiConnector", **fields: Any
    ) -> tuple[str, str]:
        child = {"kv_connector": "NVMeoFOffloadingConnector", **fields}
        child["kv_connector_extra_config"] = {"targets": run.pool}
        connectors = {"connectors": [child, *others]}
        multi = {"kv_connector": by, "kv_role": "kv_both"}
        return "--kv-transfer-config", json.dumps(
            {**multi, "kv_connector_extra_config": connectors}
        )

    def beside(name: str, **more: str) -> dict[str, Any]:
        return run.cli(*combined({"kv_connector": name, "kv_role": "kv_both"}, **more))

    return {
        "role": run.cli(*run.transfer(**{**ours, "kv_role": "kv_producer"})),
        "lmcache_and_ours": run.cli(
            *("--kv-offloading-backend", "lmcache"), *size, *run.transfer(**ours)
        ),
        "combined": beside("ExampleConnector"),
        "combined_size": run.cli(*backend, *size, *combined()),
        "combined_unknown": beside("NoSuchConnector"),
        "combined_role": run.cli(*combined(kv_role="kv_consumer")),
        "combined_twice": beside("NVMeoFOffloadingConnector"),
        "combined_stock": beside("OffloadingConnector"),
        "combined_nixl": beside("NixlConnector"),
        "combined_by_our_name": beside("NixlConnector", by="NVMeoFMultiConnector"),
        "combined_mooncake": beside("MooncakeStoreConnector"),
        "combined_without": run.cli(
            *backend, *run.transfer(kv_connector="MultiConnector", kv_role="kv_both")
        ),
    }


def probe_broken(run: Probe, internal: str) -> dict[str, Any]:
    """The plugin with one of vLLM's internals missing, and then the JSON form without it."""
    import vllm.config
    import vllm.engine.arg_utils as arg_utils

    from vllm_nvmeof_offload import plugin

    if internal == "method":
        method = vllm.config.VllmConfig._post_init_kv_transfer_config
        del vllm.config.VllmConfig._post_init_kv_transfer_config
    else:
        field = vllm.config.CacheConfig.__dataclass_fields__["kv_offloading_backend"]
        choice, field.type = field.type, str
    plugin.register()
    plugin.register()
    log = list(run.lines)
    if internal == "method":
        vllm.config.VllmConfig._post_init_kv_transfer_config = method
    else:
        field.type = choice
    ours = {
        "kv_connector": "NVMeoFOffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "vllm_nvmeof_offload.connector",
    }
    spec = {"spec_name": "NVMeoFOffloadingSpec", "spec_module_path": "vllm_nvmeof_offload.spec"}
    cache = arg_utils.get_kwargs(arg_utils.CacheConfig)
    return {
        "log": log,
        "choices": list(cache["kv_offloading_backend"].get("choices", [])),
        "json": run.cli(*run.transfer(spec, **ours)),
    }


def forked(scratch: Path, work: Callable[[], object]) -> dict[str, Any]:
    """Run `work` in a fork; return its exit status, what it printed, and its result."""
    names = {name: scratch / f"fork.{name}" for name in ("out", "err", "result")}
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(names[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        status = 70
        try:
            names["result"].write_text(json.dumps(work()))
            status = 0
        except SystemExit as end:  # as the interpreter does
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001 - the fork must not go on as its parent
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found: dict[str, Any] = {"status": status}
    for name, file in names.items():
        text = file.read_text() if file.exists() else ""
        found[name] = json.loads(text or "null") if name == "result" else text
        file.unlink(missing_ok=True)
    return found


def command(*arguments: str, **env: str) -> Callable[[], object]:
    """The `vllm` command with these arguments, as its console script runs it."""

    def work() -> object:
        from vllm.entrypoints.cli.main import main

        os.environ.update(env)
        sys.argv = ["vllm", *arguments]
        return main()

    return work


def main() -> None:
    model, scratch = sys.argv[1], Path(sys.argv[2])
    import vllm.engine.arg_utils  # noqa: F401 - once, before all forks

    cost = forked(scratch, probe_cost)["result"]
    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    run = Probe(model, str(scratch / "pool"))
    refused = command("serve", "--config", str(scratch / "serve.yaml"), VLLM_NVMEOF_TARGTS="/x")
    forks = {
        "no_method": forked(scratch, lambda: probe_broken(run, "method")),
        "no_choice": forked(scratch, lambda: probe_broken(run, "field")),
        "help": forked(scratch, command("serve", "--help=kv-offloading-backend")),
        "serve": forked(scratch, refused),
    }
    start, seen = command("serve", "--config", str(scratch / "serve.yaml")), scratch / "seen"
    for change in SERVED:
        served = functools.partial(serve, run, change)
        forks[change.__name__] = forked(scratch, served)
    for change in REFUSED:
        work = functools.partial(refuse, run, start, change, seen)
        done = forked(scratch, work)
        cases = json.loads(seen.read_text()) if seen.exists() else {}
        forks[change.__name__] = {**done, "cases": cases}
        seen.unlink(missing_ok=True)
    print(json.dumps({**cost, **probe(run), **probe_combined(run), "forks": forks}))


def new_version() -> None:
    import vllm

    vllm.__version__ = "0.34.0"


def new_abstract_method() -> None:
    from vllm.v1.kv_offload.base import OffloadingManager

    OffloadingManager.pin_everything = abc.abstractmethod(lambda self: None)
    abc.update_abstractmethods(OffloadingManager)


def new_parameter() -> None:
    from vllm.v1.kv_offload.base import OffloadingWorker

    def submit_store(self: Any, job_id: int, priority: int, src_spec: Any, dst_spec: Any) -> bool:
        raise AssertionError("refused by its parameters, before anything is stored")

    OffloadingWorker.submit_store = abc.abstractmethod(submit_store)


def name_gone() -> None:
    import vllm.v1.kv_offload.base as base

    del base.TierFilter


def attribute_gone() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import worker

    class OffloadingConnectorWorker:
        def __init__(self) -> None:
            self.spec = None

    worker.OffloadingConnectorWorker = OffloadingConnectorWorker


def new_version_and_parameter() -> None:
    new_version()
    new_parameter()


def new_options() -> None:
    """A later release whose calls take more than those that we know, and need not."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )
    from vllm.v1.kv_offload.base import OffloadingWorker

    new_version()

    def submit_store(
        self: Any, job_id: int, src_spec: Any, dst_spec: Any, urgent: bool = False
    ) -> bool:
        raise AssertionError("only looked at")

    def on_new_request(self: Any, request: Any, session: str | None = None) -> None:
        raise AssertionError("only looked at")

    OffloadingWorker.submit_store = abc.abstractmethod(submit_store)
    OffloadingConnector.on_new_request = on_new_request


#: With these the backend is refused.
REFUSED = (
    *(new_abstract_method, new_parameter, name_gone, attribute_gone),
    new_version_and_parameter,
)
#: With these it is served, unless the configuration is strict.
SERVED = (new_version, new_options)
_OURS = {"kv_connector": "NVMeoFOffloadingConnector", "kv_role": "kv_both"}


def refuse(run: Any, serve: Callable[[], object], change: Callable[[], None], seen: Path) -> None:
    """What such a vLLM does: nothing else without our backend; with it an exception in a program,
    written to `seen`, and last the `vllm` command, whose end is this process's."""
    from vllm_nvmeof_offload import plugin

    change()
    plugin.register()
    found = {
        "none": run.cli(),
        "flag": run.cli("--kv-offloading-backend", "nvmeof", *run.transfer()),
        "json": run.cli(*run.transfer(**_OURS)),
        "api": run.api(kv_offloading_backend="nvmeof", kv_offloading_size=1),
    }
    seen.write_text(json.dumps(found))
    serve()


def serve(run: Any, change: Callable[[], None]) -> dict[str, Any]:
    """The configurations of such a vLLM."""
    from vllm_nvmeof_offload import plugin

    change()
    plugin.register()
    return {
        "none": run.cli(),
        "served": run.cli(*run.transfer(**_OURS)),
        "strict": run.cli(*run.transfer({"allow_unknown_vllm": False}, **_OURS)),
    }


if __name__ == "__main__":
    main()
