# SPDX-License-Identifier: Apache-2.0
"""The kill matrix: which suite notices which broken rule. `python -m tests.kill_matrix --help`."""
