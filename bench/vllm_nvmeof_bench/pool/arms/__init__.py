# SPDX-License-Identifier: Apache-2.0
"""The contestants. `Field` opens those that can run, all on one directory, for one block size."""
