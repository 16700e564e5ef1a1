# SPDX-License-Identifier: Apache-2.0
"""Public traces of LLM requests: readers of their files, and who asks what when."""
