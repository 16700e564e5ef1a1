# SPDX-License-Identifier: Apache-2.0
"""Reads a vLLM with this package in its tree: flags, configurations and factories, as JSON.

Usage: grafted_child.py MODEL_DIRECTORY TARGET_DIRECTORY
"""

from __future__ import annotations

import json
import sys
from typing import Any


def transfer(config: Any) -> dict[str, Any]:
    found = config.kv_transfer_config
    names = ("kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy")
    return {**{name: getattr(found, name) for name in names}, **found.kv_connector_extra_config}


def configurations(model: str, target: str) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    fixed = ["--model", model, "--load-format", "dummy", "--dtype", "float32"]
    fixed += ["--skip-tokenizer-init", "--enforce-eager"]

    def build(*arguments: str, **fields: Any) -> dict[str, Any]:
        given = ["--kv-transfer-config", json.dumps(fields)] if fields else []
        parsed = parser.parse_args([*fixed, *arguments, *given])
        try:
            return transfer(AsyncEngineArgs.from_cli_args(parsed).create_engine_config())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the case under test
            return {"error": f"{type(error).__name__}: {error}"}

    both, extra = {"kv_role": "kv_both"}, {"targets": target}
    flag = ("--kv-offloading-backend", "nvmeof", "--kv-offloading-size", "1")
    stock = {"kv_connector": "OffloadingConnector", **both}
    ours = {"kv_connector": "NVMeoFOffloadingConnector", **both}
    spec = {**extra, "spec_name": "NVMeoFOffloadingSpec"}
    return {
        "flag": build(*flag, kv_connector_extra_config=extra),
        "fail": build(*flag, kv_connector_extra_config=extra, kv_load_failure_policy="fail"),
        "ours": build(**ours, kv_connector_extra_config=extra),
        "stock": build(**stock, kv_connector_extra_config=spec),
        "native": build("--kv-offloading-backend", "native", "--kv-offloading-size", "1"),
        "unknown_key": build(*flag, kv_connector_extra_config={"targts": target}),
    }


def registered() -> dict[str, Any]:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    named = KVTransferConfig(kv_connector="NVMeoFOffloadingConnector", kv_role="kv_both")
    return {
        "connector": KVConnectorFactory.get_connector_class(named).__module__,
        "spec": OffloadingSpecFactory.get_spec_cls(
            {"spec_name": "NVMeoFOffloadingSpec"}
        ).__module__,
        "watched": EngineCore.collective_rpc.__wrapped__.__qualname__,
        "post_init_wrapped": hasattr(VllmConfig._post_init_kv_transfer_config, "__wrapped__"),
    }


def main() -> None:
    model, target = sys.argv[1:]
    import vllm
    from vllm.engine.arg_utils import CacheConfig, get_kwargs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    print(
        json.dumps(
            {
                "version": vllm.__version__,
                "choices": list(get_kwargs(CacheConfig)["kv_offloading_backend"]["choices"]),
                **configurations(model, target),
                **registered(),
                "plugin": [n for n in sys.modules if n.startswith("vllm_nvmeof_offload")],
            }
        )
    )


if __name__ == "__main__":
    main()
