# SPDX-License-Identifier: Apache-2.0
"""`bench serve …`: benchmarks of whole servers, started here or given by URL."""
