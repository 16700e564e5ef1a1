# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof doctor`: checks this machine and its targets, down to each NVMe-oF path."""
