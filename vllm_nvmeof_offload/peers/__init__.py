# SPDX-License-Identifier: Apache-2.0
"""The seam to peers, servers that read for us over their storage links. None is connected yet."""
