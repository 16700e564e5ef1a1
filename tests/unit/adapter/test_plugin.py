# SPDX-License-Identifier: Apache-2.0
"""The plugin, in real vLLM processes: the flag, the JSON forms, refusals before model load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.adapter import MODEL

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

CONNECTOR = "NVMeoFOffloadingConnector"
MODULE = "vllm_nvmeof_offload.connector"
GIB = 1 << 30
OURS = {
    "kv_connector": CONNECTOR,
    "kv_connector_module_path": MODULE,
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
SPEC = {"spec_name": "NVMeoFOffloadingSpec", "spec_module_path": "vllm_nvmeof_offload.spec"}


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    scratch = tmp_path_factory.mktemp("plugin")
    model = scratch / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    (scratch / "serve.yaml").write_text(
        f"model: {model}\nload-format: dummy\nskip-tokenizer-init: true\ndtype: float32\n"
        "kv_offloading_backend: nvmeof\nkv-offloading-size: 1\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_NVMEOF_")}
    env |= {
        "VLLM_NVMEOF_ALLOW_ROOT_FILE_SYSTEM": "true",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(scratch / "cache"),
    }
    script = Path(__file__).with_name("plugin_probe.py")
    command = [sys.executable, str(script), str(model), str(scratch)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_nvmeof_is_a_choice_beside_vllms_own(probed: dict[str, Any]) -> None:
    assert {"native", "lmcache", "nvmeof"} <= set(probed["choices"])


def test_an_unused_plugin_costs_little(probed: dict[str, Any]) -> None:
    # The factory by itself would take a second; our configuration and connector are not needed yet.
    added = probed["modules_added"]
    assert all(name.split(".")[0] == "vllm_nvmeof_offload" for name in added), added
    assert "vllm_nvmeof_offload.config" not in added
    assert MODULE not in added
    # CPU time, because wall time means nothing on a busy machine; seen: 0.006 to 0.015 s.
    assert probed["cpu_seconds"] < 0.2


def test_registering_again_changes_nothing(probed: dict[str, Any]) -> None:
    assert probed["wrapped_once"]


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        *((case, {"staging_bytes": GIB}) for case in ("flag", "flag_underscored", "flag_no_json")),
        *((case, {"staging_bytes": GIB}) for case in ("api", "json_ours_and_size")),
        ("json_wins", {"staging_bytes": "2GiB"}),
        *((case, {}) for case in ("flag_no_size", "json_ours", "json_stock")),
    ],
)
def test_each_way_to_name_us_brings_connector_size_and_policy(
    probed: dict[str, Any], case: str, settings: dict[str, Any]
) -> None:
    found = probed[case]
    assert OURS.items() <= found.items()
    extra = found["kv_connector_extra_config"]
    assert {**SPEC, **settings}.items() <= extra.items()
    assert "cpu_bytes_to_use" not in extra
    assert case in ("flag_no_json", "api") or extra["targets"].endswith("/pool")


def test_without_a_size_the_default_is_used_and_logged(probed: dict[str, Any]) -> None:
    found = probed["flag_no_size"]
    assert found["kv_connector_extra_config"]["staging_bytes"] > 0
    (line,) = found["log"]
    assert "no --kv-offloading-size given; using" in line


def test_a_policy_that_the_user_named_stays(probed: dict[str, Any]) -> None:
    assert probed["json_fail"]["kv_load_failure_policy"] == "fail"
    assert any("a failed load will end its request" in x for x in probed["json_fail"]["log"])
    assert probed["prompt_only"]["kv_connector_extra_config"]["offload_prompt_only"] is True


def test_a_configuration_made_before_the_plugin_counts_as_not_named(
    probed: dict[str, Any],
) -> None:
    assert probed["early_policy"] == "fail"
    assert probed["api_early_json"]["kv_load_failure_policy"] == "recompute"


def test_vllms_default_policy_is_pickled_as_a_plain_string(probed: dict[str, Any]) -> None:
    assert probed["pickled_policy"] == "str"


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("other_connector", ["kv_connector='X'", "leave out the flag"]),
        ("unknown_key", ["targts='/x'", "did you mean targets?"]),
        ("wrong_type", ["store_threshold='8'", "an integer from 1 to 1000000"]),
        ("tiny_pool", ["pool_bytes='4.0 KiB'", "smaller than one slot", "0 for no pool"]),
        ("tiny_staging", ["staging_bytes='4.0 KiB'", "too small for 3 slots", "at least"]),
        ("huge_size", ["--kv-offloading-size=", "this machine has"]),
        ("negative_size", ["--kv-offloading-size=-1.0", "above 0"]),
        ("role", ["kv_role='kv_producer'", "give kv_both"]),
        ("lmcache_and_ours", ["--kv-offloading-backend='lmcache'", CONNECTOR, "leave out one"]),
        ("combined_role", ["kv_role='kv_consumer'", "give kv_both"]),
        ("combined_twice", [f"connectors='{CONNECTOR}'", "give it only once"]),
        ("combined_stock", ["connectors='OffloadingConnector'", "offloads KV too", "use either"]),
        (
            "combined_mooncake",
            ["connectors='MooncakeStoreConnector'", "may report failed loads", "use either"],
        ),
        ("combined_without", ["kv_connector='MultiConnector'", "among its connectors"]),
        ("bad_target", ["targets='/proc/x'", "cannot be written", "pool_bytes=0"]),
    ],
)
def test_unsupported_settings_are_refused_before_the_model_loads(
    probed: dict[str, Any], case: str, parts: list[str]
) -> None:
    error = probed[case]["error"]
    assert error.startswith("ConfigError: ")
    for part in parts:
        assert part in error


def test_a_configuration_is_checked_against_the_machine_once(probed: dict[str, Any]) -> None:
    found = probed["full_machine"]
    assert "the machine is full" in found["new"]["error"]
    assert found["again"]["kv_connector"] == CONNECTOR
    assert found["again"]["log"] == []


def test_as_one_of_several_connectors_it_is_completed_the_same_way(probed: dict[str, Any]) -> None:
    others_by_case = {
        "combined": 1,
        "combined_size": 0,
        "combined_nixl": 1,
        "combined_by_our_name": 1,
    }
    for case, others in others_by_case.items():
        found = probed[case]
        # vLLM treats a connector by this name as several; the class is ours.
        assert found["kv_connector"] == "MultiConnector", case
        assert found["kv_connector_module_path"] == "vllm_nvmeof_offload.multi_connector"
        assert found["kv_load_failure_policy"] == "recompute"
        (child, *rest) = found["kv_connector_extra_config"]["connectors"]
        assert len(rest) == others
        assert child["kv_connector"] == CONNECTOR
        assert child["kv_connector_module_path"] == MODULE
        assert child["kv_role"] == "kv_both"
        assert child["kv_connector_extra_config"]["spec_name"] == "NVMeoFOffloadingSpec"
        assert child["kv_connector_extra_config"]["staging_bytes"] > 0
    (child,) = probed["combined_size"]["kv_connector_extra_config"]["connectors"]
    assert child["kv_connector_extra_config"]["staging_bytes"] == GIB
    unknown = probed["combined_unknown"]["error"]
    assert "Unsupported connector type: NoSuchConnector" in unknown, "vLLM's own words"


def test_other_backends_work_as_without_the_plugin(probed: dict[str, Any]) -> None:
    assert probed["none"] == {"log": []}
    assert probed["native_no_size"] == {"log": []}
    assert probed["lmcache"] == {"log": []}
    native = probed["native"]
    assert native["kv_connector"] == "OffloadingConnector"
    assert native["kv_connector_module_path"] is None
    assert native["kv_load_failure_policy"] == "fail"
    assert native["kv_connector_extra_config"] == {"cpu_bytes_to_use": GIB}
    stock = probed["stock_cpu"]
    assert stock["kv_connector"] == "OffloadingConnector"
    assert stock["kv_connector_extra_config"] == {"cpu_bytes_to_use": GIB}
    assert stock["log"] == native["log"] == []


@pytest.mark.parametrize("fork", ["no_method", "no_choice"])
def test_an_unexpected_vllm_gets_one_line_and_the_json_form_still_works(
    probed: dict[str, Any], fork: str
) -> None:
    import vllm

    assert probed["forks"][fork]["status"] == 0, probed["forks"][fork]["err"]
    found = probed["forks"][fork]["result"]
    (line,) = found["log"]
    assert f"vLLM {vllm.__version__} is not as expected" in line
    assert "\n" not in line
    assert "nvmeof" not in found["choices"]
    assert found["json"]["kv_connector"] == CONNECTOR
    assert found["json"]["kv_connector_module_path"] == MODULE


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("new_abstract_method", "(OffloadingManager.pin_everything is new)"),
        ("new_parameter", "(OffloadingWorker.submit_store(self: 'Any', job_id: 'int', prio"),
        ("new_version_and_parameter", "(OffloadingWorker.submit_store(self: 'Any', job_id: 'int',"),
        ("name_gone", "(cannot import name 'TierFilter' from 'vllm.v1.kv_offload.base')"),
        ("attribute_gone", "(OffloadingConnectorWorker.worker is gone)"),
    ],
)
def test_a_different_vllm_is_refused_in_one_line_only_if_our_backend_is_selected(
    probed: dict[str, Any], change: str, reason: str
) -> None:
    done = probed["forks"][change]
    assert done["cases"]["none"] == {"log": []}
    for case in ("flag", "json", "api"):
        error = done["cases"][case]["error"]
        assert error.startswith("IntegrationError: ") and "\n" not in error
        assert reason in error and "use a release of vLLM 0.32 or 0.33, or" in error
        assert ("vLLM 0.34.0" in error) == (change == "new_version_and_parameter")
    assert done["status"] == 1
    assert "Traceback" not in done["out"] + done["err"]
    last = done["err"].strip().splitlines()[-1]
    assert last.startswith("vllm: error: ") and reason in last


@pytest.mark.parametrize("change", ["new_version", "new_options"])
def test_an_unknown_vllm_with_all_that_is_used_is_served_unless_the_operator_is_strict(
    probed: dict[str, Any], change: str
) -> None:
    found = probed["forks"][change]["result"]
    assert found["none"] == {"log": []}
    assert found["served"]["kv_connector_module_path"] == MODULE
    assert found["strict"]["error"].startswith(
        "ConfigError: allow_unknown_vllm=False: vLLM 0.34.0 is not known to this "
        "vllm-nvmeof-offload; use vLLM 0.32 or 0.33, or"
    )


def test_vllm_serve_shows_one_plain_line_for_a_configuration_it_cannot_use(
    probed: dict[str, Any],
) -> None:
    # A YAML --config with the underscored key reached us, and a bad variable ended it.
    done = probed["forks"]["serve"]
    assert done["status"] == 1
    assert "Traceback" not in done["out"] + done["err"]
    last = done["err"].strip().splitlines()[-1]
    assert last.startswith("vllm: error: VLLM_NVMEOF_TARGTS='/x': unknown environment variable")
    assert "VLLM_NVMEOF_TARGETS" in last


def test_vllm_serve_help_shows_the_backend(probed: dict[str, Any]) -> None:
    done = probed["forks"]["help"]
    assert done["status"] == 0, done["err"]
    assert "nvmeof" in done["out"]
