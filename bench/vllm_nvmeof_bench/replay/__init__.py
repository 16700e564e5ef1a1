# SPDX-License-Identifier: Apache-2.0
"""`bench replay`: agentic sessions of a public trace against servers."""
