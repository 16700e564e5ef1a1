# SPDX-License-Identifier: Apache-2.0
"""The life of targets while a server runs: verdicts on them, and their return after an outage.

health    the verdict on each target, from what its I/O does; pure
reattach  watches targets that are away, and attaches those that came back
prober    looks at one target's path, in a process of its own that may hang
"""
