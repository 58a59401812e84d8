"""Who did not come, when a wait has ended: ranks that gave up an exchange say so in the store."""

import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

_LONGEST = 10.0  # seconds for the others to answer, once the connections are closed
_PAUSE = 0.02


class Arrivals:
    """Of the ranks of one group; `names`: as users know them."""

    def __init__(
        self, store: Store, rank: int, names: Sequence[int], timeout: timedelta, occasion: str
    ) -> None:
        self._store, self._names, self._occasion = store, names, occasion
        self._key = f"{occasion} {rank}"
        self.patience = min(_LONGEST, timeout.total_seconds() / 2)
        self._checked_in: float | None = None  # when this rank did

    def check_in(self) -> None:
        """This rank is here."""
        if self._checked_in is None:
            self._checked_in = time.monotonic()
        self._store.set(self._key, "")

    def absent(self, patience: float | None = None) -> list[int]:
        """The names of those that do not answer in time, which runs from this rank's answer."""
        started = time.monotonic() if self._checked_in is None else self._checked_in
        deadline = started + (self.patience if patience is None else patience)
        while True:
            missing = [name for place, name in enumerate(self._names) if not self._is_here(place)]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(_PAUSE)

    def _is_here(self, place: int) -> bool:
        here: bool = self._store.check([f"{self._occasion} {place}"])
        return here


def explain(absent: Sequence[int]) -> str:
    """Why a wait may have ended, and what to do."""
    ranks = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
    return (
        f"{ranks} did not come, and may just be busy, evaluating or saving: if so, let attach(..., "
        "timeout=) be longer than that takes; its default is the time-out of the model's process "
        "group"
    )
