# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof pool`: commands on pools on disk, which need no server.

show     every command's output: pools as JSON and as tables; progress bars
check    fsck and scrub
offline  one rank directory opened without an engine; rm and prefill
"""
