# SPDX-License-Identifier: Apache-2.0
"""`bench alone`: the cost of sharing where there is nobody to share with."""
