# SPDX-License-Identifier: Apache-2.0
"""A read-only inventory of this machine and of the fabric under its targets."""
