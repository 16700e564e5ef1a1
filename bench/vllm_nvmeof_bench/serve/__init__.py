# SPDX-License-Identifier: Apache-2.0
"""`bench serve …`: benchmarks of whole servers, ours or any given by its URL."""
