# SPDX-License-Identifier: Apache-2.0
"""The targets of a running server: verdicts on their health, and their return after an outage."""
