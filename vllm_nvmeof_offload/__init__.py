# SPDX-License-Identifier: Apache-2.0
"""KV-cache offloading for vLLM: pinned CPU memory and a file pool on NVMe-over-Fabrics.

Importing the package imports nothing of vLLM or torch.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
