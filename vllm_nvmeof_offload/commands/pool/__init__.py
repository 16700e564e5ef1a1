# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof pool`: commands on pools on disk, which need no server.

cli      the commands and their options
show     ls, du, inspect: pools as JSON and as tables; progress bars
check    fsck and scrub
edit     rm and prefill
offline  one rank directory opened for all of these
"""
