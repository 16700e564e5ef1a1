# SPDX-License-Identifier: Apache-2.0
"""`bench hotpath …`: the cost per chunk on every thread for which requests wait."""
