# SPDX-License-Identifier: Apache-2.0
"""`bench moving`: conversations whose turns go to two servers in turn."""
