# SPDX-License-Identifier: Apache-2.0
"""Loads through peers: other servers read for us over their storage links, and we read for them."""
