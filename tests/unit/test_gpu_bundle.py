# SPDX-License-Identifier: Apache-2.0
"""What is packed for a GPU machine that reaches no package index. Fetching is not tested here."""

from __future__ import annotations

import importlib.util
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bundle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_bundle", ROOT / "tools/gpu_bundle.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_of_vllm_s_wheel_only_what_is_needed_is_unpacked(
    bundle: ModuleType, tmp_path: Path
) -> None:
    kept = ["vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/__init__.py", "vllm/LICENSE"]
    heavy = [
        *("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so"),
        *("vllm/vllm-rs", "vllm/third_party/deep_gemm/include/a/b.hpp"),
    ]
    with zipfile.ZipFile(tmp_path / "v.whl", "w") as wheel:
        for name in kept + heavy:
            wheel.writestr(name, "12345")
    site = tmp_path / "site"
    assert bundle.unpack_slim(tmp_path / "v.whl", site) == 5 * len(heavy)
    found = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert found == {*kept, bundle.STAND_IN}


def test_the_parts_give_back_the_whole(bundle: ModuleType, tmp_path: Path) -> None:
    site = tmp_path / bundle.NAME
    (site / "__pycache__").mkdir(parents=True)
    (site / "__pycache__" / "left.pyc").touch()
    content = bytes(range(256)) * 4096
    (site / "file").write_bytes(content)
    old = tmp_path / f"{bundle.NAME}.part99"
    old.touch()
    parts = bundle.pack(site, tmp_path, 100)
    assert len(parts) > 2 and not old.exists()
    assert all(part.stat().st_size <= 100 for part in parts)
    (tmp_path / "there").mkdir()
    packed = b"".join(part.read_bytes() for part in parts)
    subprocess.run(["tar", "xJ", "-C", str(tmp_path / "there")], input=packed, check=True)
    there = tmp_path / "there" / bundle.NAME
    assert [path.name for path in there.iterdir()] == ["file"]
    assert (there / "file").read_bytes() == content
