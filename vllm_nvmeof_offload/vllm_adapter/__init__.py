# SPDX-License-Identifier: Apache-2.0
"""The code that imports vLLM or is called by vLLM."""
