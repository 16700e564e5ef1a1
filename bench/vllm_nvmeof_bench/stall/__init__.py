# SPDX-License-Identifier: Apache-2.0
"""`bench stall`: how long running requests wait while a long prompt returns."""
