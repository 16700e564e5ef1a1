# SPDX-License-Identifier: Apache-2.0
"""GPUs by NVML: values read from a made-up driver, and the findings from them."""

from __future__ import annotations

import sys
import types

import pytest

from tests.unit.fabrics.trees import Tree
from vllm_nvmeof_offload.fabric import machine as judge_gpu
from vllm_nvmeof_offload.fabric.findings import Severity
from vllm_nvmeof_offload.fabric.machine import Gpu, Machine, gpu_warnings, judge_gpus, read_gpus
from vllm_nvmeof_offload.fabric.topology import PcieLink

UUID = "0123456789abcdef0123456789abcdef"
#: Every call to NVML, and the answers of a made-up driver.
ANSWERS = {
    "nvmlDeviceGetPerformanceState": 0,
    "nvmlDeviceGetCurrPcieLinkGeneration": 4,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetName": "Made-up GPU",
    "nvmlDeviceGetUUID": "GPU-01234567-89ab-cdef-0123-456789abcdef",
    "nvmlDeviceGetPciInfo": types.SimpleNamespace(busId="00000000:3B:00.0"),
    "nvmlDeviceGetHandleByIndex": 0,
    "nvmlSystemGetDriverVersion": "580.95.05",
}


def made_up_nvml(**changed: object) -> types.ModuleType:
    nvml = types.ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def answering(value: object) -> object:
        def call(handle: int = 0) -> object:
            if value is None:
                raise NVMLError("not supported")
            return value

        return call

    for name, value in {**ANSWERS, **changed}.items():
        setattr(nvml, name, answering(value))
    nvml.NVMLError = NVMLError
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetCount = lambda: 1
    return nvml


def read(tree: Tree, monkeypatch: pytest.MonkeyPatch, **changed: object) -> Gpu:
    monkeypatch.setitem(sys.modules, "pynvml", made_up_nvml(**changed))
    tree.write(tree.sysfs / "bus/pci/devices/0000:3b:00.0", {"numa_node": "1"})
    (gpu,) = read_gpus(str(tree.sysfs))
    return gpu


def machine(gpu: Gpu, own: int = 1) -> Machine:
    nodes = {0: frozenset({0}), 1: frozenset({1})}
    return Machine(nodes, frozenset({own}), (gpu,), (6, 12), "6.12")


def test_link_and_place_are_read(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = read(tree, monkeypatch)
    link = PcieLink("0000:3b:00.0", 16.0, 32.0, 16, 16, 1)
    assert gpu == Gpu(0, 1, "Made-up GPU", UUID, link, False, "580.95.05")


def test_a_slower_link_is_a_warning(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    link, node = judge_gpus(machine(read(tree, monkeypatch)))
    assert (link.check, link.severity) == ("gpu_link", Severity.WARNING)
    assert link.evidence == "Made-up GPU runs at 16 GT/s x16, but supports 32 GT/s x16"
    assert "3b:00.0" in link.remedy
    assert (node.check, node.severity) == ("gpu_node", Severity.OK)


def test_the_link_of_an_idle_gpu_may_sleep(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = read(tree, monkeypatch, nvmlDeviceGetPerformanceState=8)
    assert judge_gpus(machine(gpu))[0].severity is Severity.OK
    # An idle link never reduces its number of lanes.
    changed = {"nvmlDeviceGetPerformanceState": 8, "nvmlDeviceGetCurrPcieLinkWidth": 8}
    gpu = read(tree, monkeypatch, **changed)
    (link, _) = judge_gpus(machine(gpu))
    assert link.severity is Severity.WARNING and "16 GT/s x8" in link.evidence


def test_a_full_link_is_ok(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = read(tree, monkeypatch, nvmlDeviceGetCurrPcieLinkGeneration=5)
    assert judge_gpus(machine(gpu))[0].severity is Severity.OK


def test_a_gpu_of_another_node_is_a_warning(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    _, node = judge_gpus(machine(read(tree, monkeypatch), own=0))
    assert node.severity is Severity.WARNING
    assert "on node 1; this process may run on node 0" in node.evidence
    assert "--cpunodebind=1" in node.remedy


def test_values_that_a_gpu_does_not_report_are_not_judged(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = dict.fromkeys(
        name for name in ANSWERS if "Pcie" in name or "Performance" in name or "UUID" in name
    )
    gpu = read(tree, monkeypatch, **silent)
    assert gpu.uuid == "" and not gpu.is_idle
    assert [one.check for one in judge_gpus(machine(gpu))] == ["gpu_node"]


def test_start_up_warns_only_about_its_own_gpu(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(read(tree, monkeypatch), own=0)
    monkeypatch.setattr(judge_gpu, "read_machine", lambda: here)
    assert [line.split(":")[0] for line in gpu_warnings(UUID)] == ["GPU 0", "GPU 0"]
    assert gpu_warnings("f" * 32) == ()


def test_nvidias_module_has_every_function_that_is_called() -> None:
    nvml = pytest.importorskip("pynvml")
    for name in (*ANSWERS, "nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "NVMLError"):
        assert callable(getattr(nvml, name)), name
