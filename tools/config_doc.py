# SPDX-License-Identifier: Apache-2.0
"""Write the keys of `config.py` into docs/configuration.md; run this after changing them.

.venv/bin/python tools/config_doc.py            # write the file
.venv/bin/python tools/config_doc.py --check    # exit with code 1 if it is out of date
"""

from __future__ import annotations

import json
import sys

from documents import Document

from vllm_nvmeof_offload.config import describe_keys

DOCUMENT = Document("configuration.md", "config_doc.py")

#: The keys by heading. The first group contains the most common keys.
GROUPS = {
    "Set these first": "staging_bytes targets pool_bytes write_policy store_threshold admission",
    "Memory and chunks": "chunk_bytes_min ahead_cache_share one_copy replicas",
    "Retention and adoption": (
        "eviction_policy retain_share boundary_tokens adopt weights_never_change"
    ),
    "I/O": "allow_root_file_system io_engine o_direct read_deadline_ms",
    "Other servers' chunks": "share server_name trust_weight_version",
    "Reads through peers": "peers peer_listen share_secret_file serve_bytes",
    "Metrics": "metrics_listen",
    "vLLM": (
        "allow_unknown_vllm offload_prompt_only blocks_per_chunk block_size "
        "self_describing_kv_events sync_load_budget_bytes canonical_layout spec_name "
        "spec_module_path"
    ),
}
#: Keys whose default depends on the machine; their `meaning` states it.
MACHINE_DEFAULTS = {"staging_bytes", "targets", "pool_bytes"}


def default_of(row: dict[str, object]) -> str:
    if row["key"] in MACHINE_DEFAULTS:
        return "by machine"
    default = row["default"]
    value = row.get("default_text") or json.dumps(default)
    if default in (None, "", []):
        return "none"
    return f"`{value}` ms" if row["unit"] == "ms" else f"`{value}`"


def keys() -> str:
    rows = {str(row["key"]): row for row in describe_keys({"HOME": "~"})}
    out = ["| key | default | meaning |", "|---|---|---|"]
    for heading, names in GROUPS.items():
        out.append(f"| **{heading}** | | |")
        found = map(rows.pop, names.split())
        out += [f"| `{row['key']}` | {default_of(row)} | {row['meaning']} |" for row in found]
    assert not rows, f"in no group: {', '.join(rows)}"
    return "\n".join(out)


if __name__ == "__main__":
    sys.exit(DOCUMENT.main(keys(), sys.argv[1:]))
