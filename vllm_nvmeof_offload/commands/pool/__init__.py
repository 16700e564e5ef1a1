# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof pool`: commands on pools on disk, which need no server."""
