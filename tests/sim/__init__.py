# SPDX-License-Identifier: Apache-2.0
"""The protocol's simulator: real manager core, real pipelines, everything else simulated."""
