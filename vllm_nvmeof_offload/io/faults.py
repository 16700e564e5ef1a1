# SPDX-License-Identifier: Apache-2.0
"""Which fault strikes which operation: knobs, from a seed and, if wanted, a control file.

A control file is JSON: `{"seed": 7, "read_eio": 2, "write_delay_ms": 50}`. It is read again
when it changes, so that a test can change the faults of a running server. How often each knob
has fired is kept in `<control file>.fired` (rank R's in `….fired.R`, from 1 on), as JSON.
`"rank": R` lets the knobs strike that rank alone, of those that read the same file.

Values: `true` strikes always; a whole number strikes that many times from then on; a fraction
is a probability. `read_delay_ms` and `write_delay_ms` are milliseconds.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections import Counter
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.names import LOGGER_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["KNOBS", "FaultPlan"]

logger = logging.getLogger(LOGGER_NAME)

#: knob → what it does.
KNOBS = {
    "read_eio": "a read completes with EIO",
    "write_eio": "a write completes with EIO; nothing is written",
    "enospc_writes": "a write completes with ENOSPC; nothing is written",
    "read_delay_ms": "every read takes this much longer",
    "write_delay_ms": "every write takes this much longer",
    "hang_reads": "a read hangs until the knob is cleared",
    "hang_writes": "a write hangs until the knob is cleared",
    "flip_byte_on_read": "a payload byte in the slab is flipped before a read: the CRC sees it",
    "swap_slots": "negative control: a read delivers, as OK, the payload of the read before it",
    "flip_with_valid_crc": "negative control: a read delivers, as OK, one wrong payload byte",
}
_CHECK_PERIOD_S = 0.01


class FaultPlan:
    """The knobs, their random numbers and their counts. One thread, the engine's caller's."""

    def __init__(
        self,
        knobs: Mapping[str, object] | None = None,
        *,
        seed: int = 0,
        control_path: Path | None = None,
        rank: int = 0,
    ) -> None:
        """Start from `knobs`; a control file, where there is one, replaces them.

        rank: whose operations these are.

        Raises:
            ConfigError: an unknown knob, or a value that is not a number or boolean.
        """
        self._control_path = control_path
        self._rank = rank
        self._control_version: tuple[int, int] | None = None
        self._checked_at = float("-inf")
        self._fired: Counter[str] = Counter()
        self._set(dict(knobs or {}), seed)
        if control_path is not None:
            self.refresh()

    @property
    def fired(self) -> dict[str, int]:
        """How often each knob has struck."""
        return dict(self._fired)

    def set(self, **knobs: object) -> None:
        """Change some knobs; the others and the random numbers stay.

        Raises:
            ConfigError: as for the constructor.
        """
        checked = _checked(knobs)
        self._knobs.update(checked)
        self._left.update({name: int(value) for name, value in checked.items()})

    def _set(self, knobs: dict[str, object], seed: int) -> None:
        if knobs.pop("rank", self._rank) != self._rank:
            knobs = {}
        checked = _checked(knobs)
        left = {name: int(value) for name, value in checked.items()}
        self._knobs, self._left = checked, left
        self._random = random.Random(seed)
        logger.info("fault injection: seed %d, %s", seed, self._knobs)

    def refresh(self) -> None:
        """Read the control file again if it has changed (at most every 10 ms)."""
        now = time.monotonic()
        if self._control_path is None or now - self._checked_at < _CHECK_PERIOD_S:
            return
        self._checked_at = now
        try:
            status = self._control_path.stat()
            version = (status.st_mtime_ns, status.st_ino)
            if version == self._control_version:
                return
            knobs = json.loads(self._control_path.read_text())
            self._set(knobs, int(knobs.pop("seed", 0)))
            self._control_version = version
        except FileNotFoundError:
            if self._control_version is not None:
                self._control_version = None
                self._set({}, 0)
        except (
            *(OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError),
            ConfigError,
        ) as error:
            # Half-written, most likely: it is read again at the next call.
            logger.warning("fault injection: cannot use %s yet: %s", self._control_path, error)

    def milliseconds(self, knob: str) -> float:
        """The value of a delay knob; counts as fired if it is not zero."""
        value = float(self._knobs.get(knob, 0))
        if value > 0:
            self.count(knob)
        return value

    def is_set(self, knob: str) -> bool:
        """True unless the knob is absent or zero."""
        return bool(self._knobs.get(knob, 0))

    def strikes(self, knob: str) -> bool:
        """Decide whether `knob` strikes now, and count it if so."""
        value = self._knobs.get(knob, 0)
        if isinstance(value, bool):
            struck = value
        elif isinstance(value, float):
            struck = self._random.random() < value
        else:
            struck = self._left.get(knob, 0) > 0
            self._left[knob] = self._left.get(knob, 0) - struck
        if struck:
            self.count(knob)
        return struck

    def below(self, limit: int) -> int:
        """A random number in [0, limit)."""
        return self._random.randrange(limit)

    def count(self, knob: str) -> None:
        self._fired[knob] += 1
        if self._control_path is not None:
            suffix = f".fired.{self._rank}" if self._rank else ".fired"
            path = self._control_path.with_name(self._control_path.name + suffix)
            temporary = path.with_name(path.name + ".new")
            temporary.write_text(json.dumps(self._fired))
            temporary.rename(path)


def _checked(knobs: Mapping[str, object]) -> dict[str, bool | int | float]:
    checked: dict[str, bool | int | float] = {}
    for name, value in knobs.items():
        if name == "seed":
            continue
        if name not in KNOBS:
            raise ConfigError("fault_injection", name, f"no such knob; there are {sorted(KNOBS)}")
        if not isinstance(value, bool | int | float) or value < 0:
            raise ConfigError(name, value, "true, a count, a probability or milliseconds")
        checked[name] = value
    return checked
