# SPDX-License-Identifier: Apache-2.0
"""What offloading costs where it cannot help: real servers with and without it, side by side."""
