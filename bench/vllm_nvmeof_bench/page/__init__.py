# SPDX-License-Identifier: Apache-2.0
"""`bench report`: all results of a directory as one Markdown page."""
