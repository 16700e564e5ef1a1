# SPDX-License-Identifier: Apache-2.0
"""I/O engines, which move slots between staging and the pool."""
