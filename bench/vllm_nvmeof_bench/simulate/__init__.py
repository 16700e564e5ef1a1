# SPDX-License-Identifier: Apache-2.0
"""`bench simulate`: both tiers over a public trace, with the product's own manager."""
