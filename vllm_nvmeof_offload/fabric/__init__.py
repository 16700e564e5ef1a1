# SPDX-License-Identifier: Apache-2.0
"""What this machine and its storage are like, seen from an operator's side."""
