# SPDX-License-Identifier: Apache-2.0
"""Figures published by others, printed next to ours.

In `rows`, a name is followed by one text per column. Figures that could not be read in their source
are left out; `note` says so.
"""

from __future__ import annotations

from vllm_nvmeof_bench.report import Published
from vllm_nvmeof_offload.commands.size.report import DATA24

_BLOG = (
    "vLLM's blog, “Inside vLLM's New Offloading Connector” (Or Ozeri, Danny Harnik; "
    "vllm-project.github.io, 2025-12-29)"
)
_LLAMA = "Llama-3.1-8B-Instruct on one NVIDIA H100, vLLM's own CPU offloading"
_PROJECTS = "the projects' own documents and threads, as read in November 2026"

TTFT = Published(
    f"{_BLOG}, figure 1",
    _LLAMA,
    (("TTFT, computed / loaded from the CPU tier", "2×–22×, by prompt length"),),
    note="Their text gives the range; the figure's points are only a picture. It has no pool.",
)
HITS = Published(
    f"{_BLOG}, figure 2",
    f"{_LLAMA}, 10,000 unique prompts of 512 tokens",
    (("throughput, many hits in the CPU tier / none", "up to 9×"),),
    note="The same text: TTFT at this prompt length fell by 2× only.",
)
COPY = Published(
    _BLOG,
    "NVIDIA H100",
    (
        ("one direction, DMA or kernel", "about 50 GB/s"),
        ("both directions at once, blocks of 2 MB, DMA", "83.4 GB/s"),
        ("both directions at once, blocks of 2 MB, kernel", "68.5 GB/s"),
    ),
)
TURNS = Published(
    DATA24.source,
    f"one drive for {DATA24.gpus_per_drive} GPUs and {DATA24.sessions_per_drive} conversations",
    note="Our table has the same columns as theirs, whose throughput and TTFT could not be read at "
    "the source and are not repeated here.",
)
REPLAY = Published(
    "AMD's recipe for ATOM with LMCache (github.com/ROCm/ATOM, table “Stress test”), of the study "
    "by Andy Luo, “ATOM + LMCache” (2026-05-22)",
    "739 agentic traces of kv-cache-tester, MiniMax-M2.5 (FP8) on two AMD MI300X, 32 users, "
    "100K context, 20 minutes",
    (
        ("requests completed", "208", "331", "374"),
        ("TTFT average", "84.0 s", "47.1 s", "38.7 s"),
        ("TTFT median", "80.1 s", "32.9 s", "34.2 s"),
        ("TTFT P95", "207.3 s", "150.2 s", "88.2 s"),
        ("input tokens/s", "6,975", "11,664", "13,462"),
        ("output tokens/s", "82", "120", "144"),
        ("hit rate", "75.6 %", "81.3 %", "83.4 %"),
    ),
    ("GPU memory only", "+ CPU tier", "+ CPU tier + NVMe"),
)
LATENCY = Published(
    "Kazan Networks, “Achieving Best-in-Class Latency for Composable Infrastructure” (Bryan "
    "Cowger, kazan-networks.com)",
    "an Intel Optane SSD behind their Fuji NVMe-oF bridge against the same drive attached directly",
    (("one read in flight, attached directly", "under 10 µs on that drive"),),
    note="They publish tables of the latency that the fabric adds at several jobs and depths, and "
    "say that with one command in flight it adds almost nothing. The tables could not be read at "
    "the source and are not repeated here.",
)
POOL = Published(
    _PROJECTS,
    "each on a different drive, as a share of the drive's speed",
    (
        ("reads of 2 MiB, ours / fio", "FlexKV: 94 % of fio (depth ≥ 8, Micron 7450)"),
        ("reads of 2 MiB, vLLM's fs tier / fio", "3.2 of 6.9 GB/s (46 %)"),
    ),
)
TIER = Published(
    _PROJECTS,
    "16 returning users of 64K tokens each, 30 GB of CPU memory",
    (
        (
            "a load of 8 × the CPU tier, streamed / through the tier",
            "3.4 s by lifeboatcache, 10.8 s by vLLM's tiering (0.31)",
        ),
    ),
    note="vLLM's tiering recomputes what does not fit. Ours compares a load without vLLM in two "
    "ways, streamed and in rounds of one tier, without recomputing. It is the smaller claim.",
)
COST = Published(
    "Andy Luo, “Benchmarking LMCache for Multi-Turn Agentic Workloads on AMD MI300X” (2026-04-20), "
    "synthetic sweep",
    "MiniMax-M2.5 (FP8) on two AMD MI300X, vLLM 0.19.0, a working set that fits into GPU memory",
    (("throughput where offloading cannot help, with / without", "10–17 % less"),),
)
