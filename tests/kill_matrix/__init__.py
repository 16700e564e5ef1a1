# SPDX-License-Identifier: Apache-2.0
"""The kill matrix: the suites that detect a broken rule. `python -m tests.kill_matrix --help`."""
