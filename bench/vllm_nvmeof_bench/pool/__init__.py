# SPDX-License-Identifier: Apache-2.0
"""The pool's I/O against fio, a bare ring loop and vLLM's fs tier, in one run on one disk."""
