# SPDX-License-Identifier: Apache-2.0
"""The configuration: defaults, precedence, and that every refusal names key, value, remedy."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_nvmeof_offload.config import (
    ENV_PREFIX,
    EXPERIMENT,
    OffloadConfig,
    Tuning,
    check_fits,
    check_memory,
    check_targets,
    chunk_blocks,
    default_target,
    describe_keys,
    diagnose,
    find_key,
    parse_config,
    resolve_pool_bytes,
    serve_slots,
    share_secret,
)
from vllm_nvmeof_offload.errors import CombinedConfigError, ConfigError
from vllm_nvmeof_offload.units import GIB, KIB, MIB


def parse(extra: dict[str, Any], **env: str) -> OffloadConfig:
    return parse_config(extra, {"HOME": "/home/someone", **env})


def test_staging_is_a_quarter_of_the_memory_up_to_8_gib_by_default() -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert parse({}).staging_bytes == min(8 * GIB, physical // 4)


def test_xdg_cache_home_moves_the_default_target_unless_it_is_relative() -> None:
    assert default_target({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == "/c/vllm-nvmeof/pool"
    assert default_target({"XDG_CACHE_HOME": "c", "HOME": "/h"}) == "/h/.cache/vllm-nvmeof/pool"


def test_a_home_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without a passwd entry
    with pytest.raises(ConfigError, match="HOME and the user database name no directory"):
        parse_config({}, {})


def test_json_wins_over_the_environment_and_the_environment_over_defaults() -> None:
    env = {
        "VLLM_NVMEOF_STORE_THRESHOLD": "3",
        "VLLM_NVMEOF_ADOPT": "False",
        "VLLM_NVMEOF_POOL_BYTES": "3GiB",
        "VLLM_NVMEOF_TARGETS": "/a:/b",
        "VLLM_NVMEOF_AHEAD_CACHE_SHARE": "0.25",
        "VLLM_NVMEOF_O_DIRECT": "off",
    }
    config = parse({"store_threshold": 5}, **env)
    assert config.store_threshold == 5
    assert config.adopt is False
    assert config.pool_bytes == 3 * GIB
    assert config.targets == ["/a", "/b"]
    assert config.ahead_cache_share == 0.25
    assert config.o_direct == "off"


def test_a_single_target_may_be_a_string() -> None:
    assert parse({"targets": "/mnt/a/"}).targets == ["/mnt/a"]


REFUSED: list[tuple[str, Any, str]] = [
    ("staging_bytes", "lots", "1GiB"),
    ("staging_bytes", 0, "above 0"),
    ("staging_bytes", -5, "above 0"),
    ("staging_bytes", True, "a size"),
    ("staging_bytes", None, "a size"),
    ("staging_bytes", float("inf"), "a size"),
    ("staging_bytes", float("nan"), "a size"),
    *(("pool_bytes", value, "0 for none") for value in ("9" * 400, 1 << 70, [1])),
    ("targets", [], "a list of paths"),
    ("targets", "", "a list of paths"),
    ("targets", ["/a", "/a/"], "twice"),
    ("targets", [7], "a list of paths"),
    ("chunk_bytes_min", "1", "4KiB to 1GiB"),
    ("chunk_bytes_min", "2GiB", "4KiB to 1GiB"),
    *(("ahead_cache_share", value, "0 to 1") for value in (1.01, -0.1, "half")),
    *(("retain_share", value, "0 to 0.5") for value in (0.51, -0.1, "half")),
    ("admission", "never", '"auto" or "always"'),
    ("io_engine", "aio", '"threads"'),
    *(("replicas", value, "--data-parallel-size") for value in (0, "2")),
    ("o_direct", True, '"auto"'),
    *(("boundary_tokens", value, "from 0 to") for value in ("often", -1, 1.5)),
    ("write_policy", "back", '"through", "on_eviction"'),
    *(("store_threshold", value, "1 to 1000000") for value in (0, True, "2")),
    *(("eviction_policy", value, "module:Class") for value in ("", 3, None)),
    ("one_copy", 1, "true or false"),
    ("allow_root_file_system", 1, "true or false"),
    *(("read_deadline_ms", value, "1 to 3600000") for value in (0, 1 << 40, "5", 8.5)),
    *(("share", value, "1 to 64 letters") for value in ("", "a b", "x" * 65, "a/b", True, "a\n")),
    *(("share", value, "too similar to another value") for value in ("Host", "OFF", "on", "all")),
    *(("server_name", value, "1 to 64 letters") for value in ("a b", "x" * 65, 7)),
    *(("peers", value, '"HOST:PORT" or a list') for value in (7, [1], None)),
    *(("peers", value, "no host before a port") for value in ("d0", ":7000", ["d0:1", "a b:1"])),
    *(("peers", value, "no port from 1") for value in ("d0:", "d0:0", "d0:65536", "d0:x")),
    ("peers", ["d0:1", "d0:1"], "twice"),
    *(
        (key, value, "give a share_secret_file")
        for key in ("peers", "peer_listen")
        for value in (
            "10.0.0.7:7000",
            "0.0.0.0:7000",
            "*:7000",
            "[::]:7000",
            "[fe80::1]:7000",
            "d0:7000",
        )
    ),
    ("peer_listen", 7000, "an address of this machine"),
    ("share_secret_file", ["secret"], "the path of a file"),
    ("peer_listen", "::1:7000", "needs brackets"),
    ("peer_listen", "tcp://d0:7000", "no host before a port"),
    ("serve_bytes", "1KiB", "at least 4KiB"),
    *(("metrics_listen", value, '"auto", "off", "HOST:PORT"') for value in (9808, None, "")),
    ("metrics_listen", "9808", "no host before a port"),
    ("metrics_listen", "nvmeof.prom", "no host before a port"),
    ("metrics_listen", "127.0.0.1:0", "no port from 1"),
    ("adopt", "yes", "true or false"),
    ("weights_never_change", 1, "true or false"),
    ("trust_weight_version", "yes", "true or false"),
    ("allow_unknown_vllm", "yes", "true or false"),
    ("offload_prompt_only", 0, "true or false"),
    ("blocks_per_chunk", 0, "at least 1"),
    ("block_size", -16, "multiple"),
    ("self_describing_kv_events", "no", "true or false"),
    ("sync_load_budget_bytes", 1, "cannot be reported"),
    ("canonical_layout", True, "leave it out"),
    ("spec_name", "CPUOffloadingSpec", "NVMeoFOffloadingSpec"),
    ("spec_module_path", 3, "leave it out"),
]


@pytest.mark.parametrize(("key", "value", "remedy"), REFUSED)
def test_a_bad_value_is_refused_with_key_value_and_remedy(
    key: str, value: Any, remedy: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse({key: value})
    assert refusal.value.key == key
    assert str(refusal.value).startswith(f"{key}={value!r}: ")
    assert remedy in refusal.value.remedy


def test_any_other_share_names_a_group() -> None:
    assert [parse({"share": one}).share_group for one in ("off", "host")] == ["", ""]
    assert parse({}, VLLM_NVMEOF_SHARE="7").share_group == "7"
    assert parse({"share": "team-a.B_2"}).share_group == "team-a.B_2"


def test_a_group_refuses_to_do_without_o_direct() -> None:
    with pytest.raises(ConfigError, match=r"o_direct='off': .*page cache.*instead of 'team'"):
        parse({"share": "team", "o_direct": "off"})
    parse({"share": "team", "o_direct": "off", "pool_bytes": 0})
    parse({"share": "host", "o_direct": "off"})


def test_peers_have_an_address_each() -> None:
    assert parse({}).peers == []
    assert parse({}).peer_listen == ""
    assert parse({"peers": "localhost:7000"}).peers == ["localhost:7000"]
    assert parse({"peer_listen": "[::1]:7000"}).peer_listen == "[::1]:7000"
    secret = {"VLLM_NVMEOF_SHARE_SECRET_FILE": "/s"}
    listed = parse({}, VLLM_NVMEOF_PEERS="d0:7000, [fe80::1]:7000", **secret).peers
    assert listed == ["d0:7000", "[fe80::1]:7000"]
    assert parse({"peer_listen": "10.0.0.7:7000"}, **secret).peer_listen == "10.0.0.7:7000"


def test_metrics_are_exported_at_an_address_or_to_a_file() -> None:
    assert parse({}).metrics_listen == "auto"
    for value in ("off", "0.0.0.0:9808", "[::1]:9808", "/var/lib/node/nvmeof.prom"):
        assert parse({}, VLLM_NVMEOF_METRICS_LISTEN=value).metrics_listen == value


@pytest.mark.parametrize("key", ["peers", "peer_listen"])
def test_peers_refuse_to_do_without_a_pool(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}=.*pool_bytes=0 means no pool"):
        parse({key: "127.0.0.1:7000", "pool_bytes": 0})


def test_every_key_has_a_refusal_in_the_table_above() -> None:
    assert {key for key, _, _ in REFUSED} == set(OffloadConfig.model_fields)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("staging_byte", "staging_bytes"),
        ("targts", "targets"),
        ("poolbytes", "pool_bytes"),
        ("read_deadline", "read_deadline_ms"),
        ("cpu_bytes_to_use", "staging_bytes"),
        ("target", "targets"),
        ("pool_size", "pool_bytes"),
        ("staging", "staging_bytes"),
        ("pool-bytes", "pool_bytes"),
        ("POOL_BYTES", "pool_bytes"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_one(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=rf"{wrong}=1: unknown key; did you mean {right}\?"):
        parse({wrong: 1})


@pytest.mark.parametrize(
    "wrong", ["local_disk", "max_local_cpu_size", "max_local_disk_size", "foo"]
)
def test_an_unknown_key_that_resembles_none_gets_no_suggestion(wrong: str) -> None:
    listed = "`vllm-nvmeof config` lists all keys"
    with pytest.raises(ConfigError, match=f"{wrong}=1: unknown key; {listed}"):
        parse({wrong: 1})
    variable = ENV_PREFIX + wrong.upper()
    with pytest.raises(
        ConfigError, match=f"{variable}='1': unknown environment variable; {listed}"
    ):
        parse({}, **{variable: "1"})
    with pytest.raises(ConfigError, match=f"no key has this name; {listed}"):
        find_key(wrong)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("0", False), ("True", True)])
def test_a_variable_may_give_a_flag_as_a_digit(text: str, value: bool) -> None:
    settings = parse({}, VLLM_NVMEOF_ALLOW_ROOT_FILE_SYSTEM=text, VLLM_NVMEOF_ADOPT=text)
    assert (settings.allow_root_file_system, settings.adopt) == (value, value)
    with pytest.raises(ConfigError, match="give true or false"):
        parse({}, VLLM_NVMEOF_ADOPT="2")
    with pytest.raises(ConfigError, match="give true or false"):
        parse({"adopt": 1})


def test_a_bad_variable_is_refused_under_its_own_name() -> None:
    with pytest.raises(ConfigError) as refusal:
        parse({}, VLLM_NVMEOF_STORE_THRESHOLD="many")
    assert refusal.value.key == "VLLM_NVMEOF_STORE_THRESHOLD"
    assert refusal.value.value == "many"


def test_an_experiment_sets_what_no_key_does() -> None:
    assert parse({}).tuning == Tuning()
    config = parse({}, **{EXPERIMENT: '{"io_depth": 8, "checksum_at": "gpu"}'})
    assert (config.tuning.io_depth, config.tuning.checksum_at) == (8, "gpu")
    assert config.tuning.io_threads == Tuning().io_threads
    with pytest.raises(ConfigError, match="io_depth=8: unknown key"):
        parse({"io_depth": 8})
    with pytest.raises(ConfigError, match="VLLM_NVMEOF_IO_DEPTH='8': unknown environment variable"):
        parse({}, VLLM_NVMEOF_IO_DEPTH="8")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"io_dept": 8}', "io_dept: Extra inputs"),
        ('{"io_depth": "8"}', "io_depth: Input should be a valid integer"),
        ('{"io_depth": 0}', "io_depth: Input should be greater"),
        ('{"copy_backend": "sm"}', "copy_backend: Input should be 'auto', 'dma' or 'kernel'"),
        ('{"fault_injection": ""}', "fault_injection: String should have at least 1 character"),
        ("[]", "Input should be an object"),
        ("", "Invalid JSON"),
    ],
)
def test_an_experiment_that_cannot_be_is_refused(text: str, why: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{why}.*give a JSON object of stream_slots, io"
    ) as error:
        parse({}, **{EXPERIMENT: text})
    assert (error.value.key, error.value.value) == (EXPERIMENT, text)


def test_two_ways_to_size_a_chunk_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="block_size=64: blocks_per_chunk=2"):
        parse({"blocks_per_chunk": 2, "block_size": 64})


SUFFIXES = [("", 1), ("KiB", KIB), ("MiB", MIB), ("GiB", GIB), (" gib", GIB), ("k", KIB)]


@given(count=st.integers(1, 1 << 20), suffix=st.sampled_from(SUFFIXES))
def test_sizes_parse_with_and_without_units(count: int, suffix: tuple[str, int]) -> None:
    text, factor = suffix
    assert parse({"staging_bytes": f"{count}{text}"}).staging_bytes == count * factor


@given(st.integers(1, 1 << 60))
def test_a_size_in_bytes_is_taken_as_it_is(count: int) -> None:
    assert parse({"staging_bytes": count}).staging_bytes == count


@given(st.one_of(st.text(), st.floats(), st.integers(), st.none(), st.lists(st.integers())))
def test_any_size_gives_a_valid_config_or_a_config_error(value: Any) -> None:
    try:
        config = parse({"staging_bytes": value})
    except ConfigError as refusal:
        assert refusal.key == "staging_bytes"  # noqa: PT017 - either way is right
    else:
        assert 0 < config.staging_bytes <= 1 << 60


def test_a_target_is_created_private_and_described(tmp_path: Path) -> None:
    target = tmp_path / "a" / "pool"
    (info,) = check_targets(parse({"targets": str(target), "allow_root_file_system": True}))
    assert stat.S_IMODE(target.stat().st_mode) == 0o700
    assert info.path == str(target)
    assert info.free_bytes > 0
    assert info.file_system not in ("", "unknown")
    assert list(target.iterdir()) == []


def test_a_target_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"targets=.*not a directory"):
        check_targets(parse({"targets": str(file)}))


def test_a_target_that_cannot_be_written_is_refused() -> None:
    # Not even root can create a directory there.
    with pytest.raises(ConfigError, match=r"targets='/proc/pool': cannot be written.*pool_bytes=0"):
        check_targets(parse({"targets": "/proc/pool"}))


def test_without_a_pool_targets_do_not_matter() -> None:
    config = parse({"targets": "/proc/pool", "pool_bytes": 0})
    assert check_targets(config) == []
    assert resolve_pool_bytes(config, 0) == 0


def test_the_default_pool_does_not_shrink_as_it_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = {"free": 40 * GIB}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(**disk))
    config = parse({"targets": [str(tmp_path / "new" / "pool")]})
    assert resolve_pool_bytes(config, 0) == 20 * GIB
    disk["free"] -= 64 * MIB
    assert resolve_pool_bytes(config, 64 * MIB) == 20 * GIB


def test_the_default_pool_counts_a_file_system_once_and_is_capped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = {"free": 40 * GIB}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(**disk))
    config = parse({"targets": [str(tmp_path / "a"), str(tmp_path / "b")]})
    assert resolve_pool_bytes(config, 0) == 20 * GIB
    disk["free"] = 1000 * GIB
    assert resolve_pool_bytes(config, 0) == 100 * GIB


def test_staging_too_small_for_its_slots_names_what_is_enough() -> None:
    slot_bytes = 516 * KIB
    with pytest.raises(ConfigError, match=r'staging_bytes=.*at least "3096KiB"'):
        check_fits(parse({"staging_bytes": 6 * slot_bytes - 1, "pool_bytes": 0}), slot_bytes, 2)
    check_fits(parse({"staging_bytes": "3096KiB", "pool_bytes": 0}), slot_bytes, 2)


def test_serve_slots_are_a_part_of_staging() -> None:
    peers = {"peer_listen": "127.0.0.1:7000", "serve_bytes": "4MiB"}
    assert serve_slots(parse({}), 516 * KIB) == 0
    assert serve_slots(parse({**peers, "serve_bytes": "8TiB"}), 516 * KIB) == 1024
    assert serve_slots(parse(peers), 516 * KIB) == 7
    check_fits(parse({**peers, "staging_bytes": 10 * 516 * KIB}), 516 * KIB, 1)
    with pytest.raises(ConfigError, match=r"10 slots .*5160KiB.*serve_bytes or chunk_bytes_min"):
        check_fits(parse({**peers, "staging_bytes": 10 * 516 * KIB - 1}), 516 * KIB, 1)
    with pytest.raises(ConfigError, match=r"serve_bytes='256.0 KiB': smaller than one.*516KiB"):
        check_fits(parse({**peers, "serve_bytes": "256KiB"}), 516 * KIB, 1)


def test_a_secret_is_what_its_file_has_and_nobody_else_may_read(tmp_path: Path) -> None:
    file = tmp_path / "a secret"
    file.write_bytes(b"\n 0123456789abcdef\n")
    file.chmod(0o400)
    config = parse({"share_secret_file": str(file)})
    assert share_secret(config) == b"0123456789abcdef"
    assert share_secret(parse({})) == b""
    for mode in (0o604, 0o602, 0o620, 0o640, 0o440):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=rf"share_secret_file=.*mode 0{mode:o}.*chmod 0600 '"):
            share_secret(config)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"0123456789abcdef")
    file.chmod(0o600)
    os.chown(file, 54321, -1)
    with pytest.raises(ConfigError, match=r"uid 54321.*chown 0 "):
        share_secret(parse({"share_secret_file": str(file)}))


@pytest.mark.parametrize(
    ("content", "why"),
    [(b" " * 99 + b"0123456789abcde", "shorter than 16"), (b"x" * 4097, "longer than 4096")],
)
def test_a_secret_of_another_size_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=f"{why} bytes; create one .*openssl rand") as refused:
        share_secret(parse({"share_secret_file": str(file)}))
    assert content.decode().strip() not in str(refused.value)


def test_what_is_no_file_holds_no_secret(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path, why in ((tmp_path, "Is a dir"), (pipe, "not a file"), (tmp_path / "x", "No such")):
        with pytest.raises(ConfigError, match=why):
            share_secret(parse({"share_secret_file": str(path)}))


def test_a_pool_smaller_than_one_slot_names_what_is_enough() -> None:
    small = parse({"staging_bytes": "1GiB", "pool_bytes": "515KiB"})
    with pytest.raises(ConfigError, match=r'pool_bytes=.*smaller than one slot.*"516KiB"'):
        check_fits(small, 516 * KIB, 1)
    enough = parse({"staging_bytes": "1GiB", "pool_bytes": "516KiB"})
    check_fits(enough, 516 * KIB, 1)
    with pytest.raises(ConfigError, match="smaller than one slot"):
        check_fits(enough, 516 * KIB, 1, replicas=2)


def test_staging_beyond_physical_memory_is_refused_under_the_key_that_set_it() -> None:
    huge = parse({"staging_bytes": "1000TiB"})
    with pytest.raises(ConfigError, match=r"--kv-offloading-size='1000.0 TiB': this machine has"):
        check_memory(huge, key="--kv-offloading-size")
    check_memory(parse({"staging_bytes": "1GiB"}))


@pytest.mark.parametrize(
    ("extra", "blocks"),
    [
        ({}, 8),  # 512 KiB of 64 KiB blocks
        ({"chunk_bytes_min": "65KiB"}, 2),
        ({"chunk_bytes_min": "1GiB"}, 16),  # 256 tokens
        ({"blocks_per_chunk": 3}, 3),
        ({"block_size": 64}, 4),
    ],
)
def test_blocks_in_a_chunk(extra: dict[str, Any], blocks: int) -> None:
    assert chunk_blocks(parse(extra), block_bytes=64 * KIB, block_tokens=16) == blocks


def test_every_key_is_described_and_ours_have_a_variable() -> None:
    rows = {row["key"]: row for row in describe_keys({"HOME": "/h"})}
    assert set(rows) == set(OffloadConfig.model_fields)
    assert all(row["meaning"] and row["allowed"] for row in rows.values())
    assert rows["targets"]["default"] == ["/h/.cache/vllm-nvmeof/pool"]
    assert rows["pool_bytes"]["variable"] == f"{ENV_PREFIX}POOL_BYTES"
    assert rows["spec_name"]["variable"] is None


def test_all_errors_are_raised_together_one_per_line() -> None:
    extra = {"foo": 1, "pool_bytes": "x", "blocks_per_chunk": 2, "block_size": 16}
    with pytest.raises(CombinedConfigError) as caught:
        parse_config(extra, {"HOME": "/root"})
    assert [one.key for one in caught.value.errors] == ["foo", "pool_bytes", "block_size"]
    assert str(caught.value).splitlines() == list(map(str, caught.value.errors))
    settings, errors = diagnose(extra, {"HOME": "/root"})
    assert len(errors) == 3
    assert (settings.pool_bytes, settings.blocks_per_chunk, settings.block_size) == (None, 2, None)


def test_a_key_is_found_by_its_variable_too() -> None:
    assert find_key("VLLM_NVMEOF_POOL_BYTES") == find_key("Pool_Bytes") == "pool_bytes"
    with pytest.raises(ConfigError, match="did you mean targets"):
        find_key("target")
