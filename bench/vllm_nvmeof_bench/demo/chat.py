# SPDX-License-Identifier: Apache-2.0
"""The demo's users, who ask about chapters of Python's own manual, which every installation has."""

from __future__ import annotations

from pydoc_data.topics import topics

from vllm_nvmeof_bench.servers.client import Answer, Message

#: Each user's chapter of the manual, and the chapter's title in the opening message.
_DOCUMENTS = (
    ("formatstrings", "format strings"),
    ("string-methods", "methods of strings"),
    ("typesseq", "sequence types"),
    ("compound", "compound statements"),
    ("specialnames", "special methods"),
)
_QUESTIONS = (
    "What is this chapter about?",
    "Give one example from it.",
    "Name three words that are defined in it.",
    "Whom would you recommend it to, and why?",
)
_CROWDS = "types"
#: A low estimate, because a prompt must not exceed its planned number of tokens.
_CHARACTERS_PER_TOKEN = 3.5


class Chat:
    """A user who asks about a chapter of at most `tokens` tokens."""

    def __init__(self, name: str, number: int, tokens: int) -> None:
        self.name = name
        self.turns = 0
        self.question = ""
        chapter, title = _DOCUMENTS[number % len(_DOCUMENTS)]
        text = topics[chapter][: int(tokens * _CHARACTERS_PER_TOKEN)]
        self._opening = f"This is a chapter of Python's manual, on {title}.\n\n{text}\n\n"
        # The name comes first, so that no two chats share a prefix and its KV.
        self._said: list[Message] = [{"role": "system", "content": f"You answer {name}."}]

    def next_prompt(self) -> list[Message]:
        """Add the user's next question and return the whole conversation."""
        self.question = _QUESTIONS[self.turns % len(_QUESTIONS)]
        said = self.question if self.turns else self._opening + self.question
        self._said.append({"role": "user", "content": said})
        self.turns += 1
        return list(self._said)

    def add(self, answer: Answer) -> None:
        self._said.append({"role": "assistant", "content": answer.text})


def crowd(count: int, tokens: int) -> list[list[Message]]:
    """Return one request per user, each about a different part of a chapter."""
    size = int(tokens * _CHARACTERS_PER_TOKEN)
    text = topics[_CROWDS]
    parts = [text[at : at + size] for at in range(0, count * size, size)]
    return [[{"role": "user", "content": f"Explain this in detail:\n\n{one}"}] for one in parts]


def words(text: str, length: int = 60) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[:length].rsplit(" ", 1)[0] + " …"
