# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of whole servers over HTTP: any `vllm serve`, or small ones started here."""
