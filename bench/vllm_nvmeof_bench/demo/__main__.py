# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_nvmeof_bench.demo`: the main job, without the `vllm-nvmeof` command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vllm_nvmeof_bench.demo.main import run


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm_nvmeof_bench.demo", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("build/demo.json"), help="figures")
    parser.add_argument("--quick", action="store_true", help="fewer, shorter conversations")
    parser.add_argument("--keep", action="store_true", help="keep the demo's pool directory")
    parser.add_argument("--pool", type=Path, default=None, help="where to make the pool")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = _arguments()
    sys.exit(run(arguments.json, arguments.quick, arguments.keep, arguments.pool))
