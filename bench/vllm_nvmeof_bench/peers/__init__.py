# SPDX-License-Identifier: Apache-2.0
"""`bench peers`: a load that two servers' storage links share."""
