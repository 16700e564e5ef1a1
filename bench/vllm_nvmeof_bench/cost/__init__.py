# SPDX-License-Identifier: Apache-2.0
"""The cost of offloading where it cannot help: real servers with and without it, side by side."""
