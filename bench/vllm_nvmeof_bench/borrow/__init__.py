# SPDX-License-Identifier: Apache-2.0
"""Time to first token of a prompt that another server has stored."""
