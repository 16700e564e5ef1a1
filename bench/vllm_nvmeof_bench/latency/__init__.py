# SPDX-License-Identifier: Apache-2.0
"""Latency of storage, two targets side by side, and the latency that our engine adds to fio."""
