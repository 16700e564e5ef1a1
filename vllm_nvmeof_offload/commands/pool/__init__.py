# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-nvmeof pool`, for pools on disk, without a server."""
