# SPDX-License-Identifier: Apache-2.0
"""Documents with a part that a tool generates."""

from __future__ import annotations

import textwrap
from pathlib import Path

_DOCS = Path(__file__).resolve().parents[1] / "docs"
_END = "<!-- end -->"


class Document:
    """The document docs/`name`, in which `tool` generates the part between two marks."""

    def __init__(self, name: str, tool: str) -> None:
        self._path = _DOCS / name
        self._begin = f"<!-- made by tools/{tool}: begin -->"

    def main(self, generated: str, arguments: list[str]) -> int:
        """Write the generated part. With `--check`, only return 1 if the file is out of date."""
        text = self._path.read_text()
        before, _, rest = text.partition(self._begin)
        _, _, after = rest.partition(_END)
        made = f"{before}{self._begin}\n{generated.rstrip()}\n{_END}{after}"
        if "--check" in arguments:
            return int(made != text)
        self._path.write_text(made)
        return 0


def item(text: str) -> str:
    return textwrap.fill(
        text,
        100,
        initial_indent="- ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
