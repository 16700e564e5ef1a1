# SPDX-License-Identifier: Apache-2.0
"""Follows the pools of the keyspace's other engines on this server's targets."""
