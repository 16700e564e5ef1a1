# SPDX-License-Identifier: Apache-2.0
"""Read-only inventory of this machine and of the fabric under its targets."""
