# SPDX-License-Identifier: Apache-2.0
"""The tiers without a server: the real manager, driven by a trace, over sizes and policies."""
