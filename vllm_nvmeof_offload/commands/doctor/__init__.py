# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof doctor`: checks this machine and its targets, down to each NVMe-oF path.

examine  each target in an order that cannot hang: discover, judge, touch, measure; the output
judge    findings from the fabric's and machine's description; pure
host     checks that try the real thing: I/O, targets, interfaces, GPUs
measure  rates and latencies of a target
"""
