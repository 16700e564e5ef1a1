# SPDX-License-Identifier: Apache-2.0
"""The life of targets while a server runs: verdicts on them, and their return after an outage."""
