# SPDX-License-Identifier: Apache-2.0
"""A declaration per benchmark: its samples, tables and goals. They need only the file."""
