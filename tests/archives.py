# SPDX-License-Identifier: Apache-2.0
"""Unpacking of archives."""

from __future__ import annotations

import tarfile
from pathlib import Path


def opened(path: Path) -> tarfile.TarFile:
    """An archive whose members stay below the place to which they are extracted. Python has the
    filter for that from 3.11.4 on."""
    archive = tarfile.open(path)  # noqa: SIM115
    archive.extraction_filter = getattr(tarfile, "data_filter", None)
    return archive
