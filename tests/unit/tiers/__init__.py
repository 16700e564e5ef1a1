# SPDX-License-Identifier: Apache-2.0
"""The native tiers, compared with a model in plain Python."""
