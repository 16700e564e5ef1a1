# SPDX-License-Identifier: Apache-2.0
"""The follower, on pools on disk."""
