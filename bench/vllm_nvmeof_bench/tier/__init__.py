# SPDX-License-Identifier: Apache-2.0
"""What coming back costs: loads beyond the CPU tier, resumes, prefetch, admission."""
