# SPDX-License-Identifier: Apache-2.0
"""All results of a directory as one Markdown page: tables, pictures, published figures beside."""
