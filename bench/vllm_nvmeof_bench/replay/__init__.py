# SPDX-License-Identifier: Apache-2.0
"""Public traces of agentic sessions, replayed against real servers."""
