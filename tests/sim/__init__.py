# SPDX-License-Identifier: Apache-2.0
"""The protocol's simulator runs the real manager core and pipelines; the rest is simulated."""
