# SPDX-License-Identifier: Apache-2.0
"""The reports: each benchmark's samples, tables and goals, which need only a results file."""
