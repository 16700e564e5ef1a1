# SPDX-License-Identifier: Apache-2.0
"""Writes the edits of `graft.py` into docs/in-tree.md; run it after a change of them.

.venv/bin/python tools/in_tree_doc.py VLLM_TREE            # writes the file
.venv/bin/python tools/in_tree_doc.py VLLM_TREE --check    # exit code 1 if it is not up to date

VLLM_TREE: the newest known release as its source distribution has it, without a graft.
"""

from __future__ import annotations

import sys
from pathlib import Path

from documents import Document
from graft import diff

DOCUMENT = Document("in-tree.md", "in_tree_doc.py")


if __name__ == "__main__":
    tree, *options = sys.argv[1:]
    sys.exit(DOCUMENT.main(f"```diff\n{diff(Path(tree))}```", options))
