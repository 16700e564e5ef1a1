# SPDX-License-Identifier: Apache-2.0
"""`bench follow`: the cost and the delay of reading another server's index."""
