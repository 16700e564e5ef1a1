# SPDX-License-Identifier: Apache-2.0
"""A cluster of prefill and decode nodes that load through the links of both. Pure.

DualPath (Wu et al., arXiv 2602.21548) gives the ratio of prefill to decode nodes within which
neither the links between nodes nor a node's memory is busy before all links to storage are. How
many agents fit follows from what the busiest part can do per second, as in any closed queue.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Nodes:
    """gpus: of one node, each with a link to other nodes. storage_links: of one node, to the pool.
    Rates are in one direction. memory_bytes_per_s: of a node's main memory."""

    prefill: int
    decode: int
    gpus: int
    storage_links: int
    link_bytes_per_s: float
    memory_bytes_per_s: float

    def ratio_range(self) -> tuple[float, float]:
        """The least and the most prefill nodes per decode node; none, if the first is larger."""
        gpus, links = self.gpus, self.storage_links
        memory = self.memory_bytes_per_s / (links * self.link_bytes_per_s)
        least = links / (gpus - links) if gpus > links else float("inf")
        most = min((gpus - 2 * links) / links, (gpus - links) / (2 * links), (memory - 3) / 2)
        return least, most

    @property
    def ratio(self) -> float:
        return self.prefill / self.decode

    def links(self, helped: bool) -> int:
        """Links that read: those of prefill nodes, and of decode nodes that help."""
        return self.storage_links * (self.prefill + self.decode * helped)


def turns_per_s(
    links: int, link_bytes_per_s: float, read_bytes: float, prefill: int, compute_s: float
) -> float:
    """Turns that links and prefill nodes carry at most, each of which reads and computes so much;
    compute_s 0: computing bounds nothing."""
    read = links * link_bytes_per_s / read_bytes
    return min(read, prefill / compute_s) if compute_s else read


def agents_at(turns: float, ttft_s: float, gap_s: float) -> int:
    """Agents whose mean TTFT is `ttft_s` when the cluster carries so many turns per second.

    gap_s: from a first token to the agent's next turn. With fewer agents the wait is shorter; each
    further agent makes all of them wait longer, because the cluster carries no more turns.
    """
    return int(turns * (ttft_s + gap_s))
