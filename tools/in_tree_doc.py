# SPDX-License-Identifier: Apache-2.0
"""Write the edits of `graft.py` into docs/in-tree.md; run this after changing them.

.venv/bin/python tools/in_tree_doc.py VLLM_TREE            # write the file
.venv/bin/python tools/in_tree_doc.py VLLM_TREE --check    # exit with code 1 if it is out of date

VLLM_TREE: the source distribution of the newest known release, without a graft.
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
