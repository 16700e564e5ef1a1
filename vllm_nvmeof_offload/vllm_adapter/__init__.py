# SPDX-License-Identifier: Apache-2.0
"""What the plugin changes in vLLM, one module per change."""
