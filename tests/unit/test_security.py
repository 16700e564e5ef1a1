# SPDX-License-Identifier: Apache-2.0
"""What is on disk is private, is never executed, and names nothing of a prompt."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

from tests.unit.pool.kit import fill, make_spec
from vllm_nvmeof_offload.copy import nvrtc
from vllm_nvmeof_offload.errors import PoolError
from vllm_nvmeof_offload.pool.pool import Pool

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("vllm_nvmeof_offload", "bench", "kernels", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
#: Who reads with these, runs what the file says.
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "pandas.read_pickle"}
#: The whole of what a pool may name: digests, numbers and constants.
NAMES = re.compile(
    r"[0-9a-f]{32}|engine-\d+|rank-\d+|slab|table|superblock|lock|owner|keyspace\.json"
)


def unsafe_in(source: str) -> list[str]:
    """What in a Python source would run, or unpickle, what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if (node.module or "").split(".")[0] in MODULES else []
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            allows = any(
                keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"
                for keyword in node.keywords
            )
            found += [name] if name in CALLS or allows else []
    return found


def test_nothing_read_from_disk_is_executed_or_unpickled() -> None:
    assert {str(p.relative_to(ROOT)): unsafe_in(p.read_text()) for p in SOURCES} == {
        str(p.relative_to(ROOT)): [] for p in SOURCES
    }


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "torch.load(file)",
        "np.load(file, allow_pickle=True)",
        "def f(text):\n    return eval(text)",
    ],
)
def test_the_check_sees_what_it_looks_for(source: str) -> None:
    assert unsafe_in(source)


def test_names_on_disk_say_nothing_of_a_prompt(tmp_path: Path) -> None:
    pool = Pool.open(make_spec(tmp_path / "target", engine="some-engine"))
    fill(pool)
    pool.close()
    names = [path.name for path in (tmp_path / "target").rglob("*")]
    assert {"slab", "table", "superblock", "lock", "owner", "keyspace.json"} <= {*names}
    assert [name for name in names if not NAMES.fullmatch(name)] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["keyspace", "engine-0", "rank-0", "slab", "table"])
def test_what_belongs_to_another_user_is_refused_by_name(tmp_path: Path, name: str) -> None:
    spec = make_spec(tmp_path / "target")
    pool = Pool.open(spec)
    directory = pool.directories[0]
    fill(pool)
    pool.close()
    places = {"keyspace": directory.parents[1], "engine-0": directory.parent, "rank-0": directory}
    place = places.get(name, directory / name)
    os.chown(place, 54321, -1)
    with pytest.raises(PoolError, match=f"{place.name}.*uid 54321|uid 54321.*{place.name}"):
        Pool.open(spec)
    os.chown(place, os.geteuid(), -1)
    Pool.open(spec).close()


@pytest.mark.parametrize(("mode", "uid"), [(0o600, 54321), (0o602, 0), (0o620, 0)])
def test_machine_code_that_another_user_could_write_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, uid: int
) -> None:
    monkeypatch.setattr(nvrtc, "compile_kernels", lambda arch: b"compiled here")
    assert nvrtc.load_or_compile("sm_90", tmp_path) == b"compiled here"
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"planted")
    assert nvrtc.load_or_compile("sm_90", tmp_path) == b"planted", "as from this user"
    file.chmod(mode)
    if uid:
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(file, uid, -1)
    assert nvrtc.load_or_compile("sm_90", tmp_path) == b"compiled here"
    assert file.read_bytes() == b"compiled here", "replaced"
