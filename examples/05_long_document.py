# SPDX-License-Identifier: Apache-2.0
"""Ask about a long document twice, with other documents in between, through the OpenAI client.

    python examples/05_long_document.py URL [URL ...]

URL is the address of a running `vllm serve`, such as http://localhost:8000. To compare, name a
server with the pool and one without. The other documents must evict this one from the GPU's cache.
"""

from __future__ import annotations

import sys
import time
from pydoc_data.topics import topics  # Python's manual, chapter by chapter

from openai import OpenAI

CHARACTERS = 12_000  # about 3,000 tokens
DOCUMENT, *OTHERS = ("formatstrings", "debugger", "typesseq", "compound", "specialnames")
QUESTION = "What is this chapter about? Answer in one sentence."


def ask(server: OpenAI, chapter: str) -> tuple[float, str]:
    """Return the seconds to the first word, and the answer."""
    text = f"{topics[chapter][:CHARACTERS]}\n\n{QUESTION}"
    began, first_s, answer = time.perf_counter(), 0.0, ""
    for event in server.chat.completions.create(
        model=server.models.list().data[0].id,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=40,
        stream=True,
    ):
        if word := event.choices[0].delta.content:
            first_s = first_s or time.perf_counter() - began
            answer += word
    return first_s, answer


for url in sys.argv[1:] or sys.exit(__doc__):
    server = OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none")
    cold_s, cold = ask(server, DOCUMENT)
    for other in OTHERS:
        ask(server, other)
    back_s, back = ask(server, DOCUMENT)
    print(f"{url}: first word after {cold_s:.2f} s, again after {back_s:.2f} s: {back}")
    print("the same answer" if back == cold else f"before, it was: {cold}")
