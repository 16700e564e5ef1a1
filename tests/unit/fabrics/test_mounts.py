# SPDX-License-Identifier: Apache-2.0
"""The mount table: escapes, optional fields, mounts on top of others; and any garbage."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_nvmeof_offload.mounts import Mount, mount_of, parse_mountinfo, read_mounts

ESCAPED = " \t\n\\#"
words = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0,"), min_size=1, max_size=8
).filter(lambda word: word != "-")
tags = st.text("abcdefghij:0123456789_", min_size=1, max_size=8)


def escape(text: str) -> str:
    """Escape as the kernel does."""
    return "".join(f"\\{ord(one):03o}" if one in ESCAPED else one for one in text)


@st.composite
def mounts(draw: st.DrawFn) -> Mount:
    return Mount(
        mount_id=draw(st.integers(0, 2**31)),
        parent_id=draw(st.integers(0, 2**31)),
        device=f"{draw(st.integers(0, 4095))}:{draw(st.integers(0, 2**20))}",
        root="/" + draw(words),
        point="/" + draw(words),
        options=tuple(draw(st.lists(tags, min_size=1, max_size=3))),
        file_system=draw(tags),
        source=draw(words),
        super_options=tuple(draw(st.lists(tags, min_size=1, max_size=3))),
    )


def line_of(mount: Mount, optional: list[str]) -> str:
    before = [mount.mount_id, mount.parent_id, mount.device, escape(mount.root)]
    before += [escape(mount.point), ",".join(mount.options), *optional]
    after = [mount.file_system, escape(mount.source), ",".join(mount.super_options)]
    return " ".join(map(str, before)) + " - " + " ".join(after)


@given(st.lists(st.tuples(mounts(), st.lists(tags, max_size=3)), max_size=4))
def test_the_kernels_escapes_are_decoded(made: list[tuple[Mount, list[str]]]) -> None:
    text = "".join(line_of(mount, optional) + "\n" for mount, optional in made)
    assert parse_mountinfo(text) == [mount for mount, _ in made]


@given(st.text())
def test_garbage_is_no_mount_and_no_error(text: str) -> None:
    for mount in parse_mountinfo(text):
        assert mount_of(mount.point, [mount]) in (mount, None)


@given(st.lists(mounts(), max_size=6), words)
def test_a_look_up_in_any_table_ends(table: list[Mount], path: str) -> None:
    assert mount_of("/" + path, table) in [*table, None]


def test_bytes_that_are_not_text_are_read(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_bytes(b"1 1 8:1 / /\xff\\040x rw - xfs /dev/sda rw\n")
    (mount,) = read_mounts(str(tmp_path / "mountinfo"))
    assert mount.point == "/\udcff x"
    assert read_mounts(str(tmp_path / "none")) == []


TABLE = """\
1 1 0:1 / / rw - rootfs rootfs rw
20 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 20 259:1 / /mnt/kv rw,noatime shared:3 master:2 - xfs /dev/nvme0n1 rw
31 20 259:2 / /mnt/kv2 rw - xfs /dev/nvme1n1 rw
40 20 8:2 / /srv rw - ext4 /dev/sdb rw
41 40 8:3 / /srv/deep rw - ext4 /dev/sdc rw
42 40 8:4 / /srv rw - ext4 /dev/sdd rw
"""


@pytest.mark.parametrize(
    ("path", "mount_id"),
    [
        ("/mnt/kv/pool", 30),
        ("/mnt/kv", 30),
        ("/mnt/kv2", 31),
        ("/mnt/kv3", 20),
        ("/mnt/../mnt/kv//x", 30),
        ("/", 20),
        ("/srv/deep/x", 42),
    ],
)
def test_a_path_is_on_the_mount_that_the_kernel_would_find(path: str, mount_id: int) -> None:
    found = mount_of(path, parse_mountinfo(TABLE))
    assert found is not None
    assert found.mount_id == mount_id


def test_without_a_root_mount_a_look_up_finds_nothing() -> None:
    assert mount_of("/x", []) is None
    assert mount_of("/x", parse_mountinfo(TABLE.splitlines()[2])) is None
