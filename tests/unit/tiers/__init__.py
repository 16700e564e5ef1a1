# SPDX-License-Identifier: Apache-2.0
"""The native tiers beside a model of them in plain Python."""
