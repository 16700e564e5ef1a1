# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half: it decides which chunks are stored, moved, kept and evicted. No I/O."""
