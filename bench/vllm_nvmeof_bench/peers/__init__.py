# SPDX-License-Identifier: Apache-2.0
"""`bench peers`: a load over two servers' storage links."""
