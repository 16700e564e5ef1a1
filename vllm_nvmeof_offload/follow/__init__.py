# SPDX-License-Identifier: Apache-2.0
"""Follows what other engines of the keyspace have in their pools on this server's targets."""
