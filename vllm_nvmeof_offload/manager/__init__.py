# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half: decides which chunks are stored, moved, kept and evicted; does no I/O."""
