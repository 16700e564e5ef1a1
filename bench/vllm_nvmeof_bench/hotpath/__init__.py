# SPDX-License-Identifier: Apache-2.0
"""`bench hotpath chunks`: the cost per chunk on every thread that requests wait for."""
