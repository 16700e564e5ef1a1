# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-nvmeof pool`, which works on pools on disk without a server."""
