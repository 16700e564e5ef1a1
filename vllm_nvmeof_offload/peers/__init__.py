# SPDX-License-Identifier: Apache-2.0
"""Loading through peers: servers that read for us over their storage links, and we for them."""
