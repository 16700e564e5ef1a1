# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half: which chunk lies where, what is kept, what goes. It does no I/O."""
