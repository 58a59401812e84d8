"""What a message says before its bytes: where its sender is in the program, and how much follows.

Every rank hears the headings of all in each call, so all notice in the same call if they are at
different places. They are then still in step with each other, and can go on.

    magic | call | doing | step | exchange | length | longest      7 int64
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

SIZE = 7 * 8  # bytes

_MAGIC = 0x746F7072656476  # "topredv"


class Doing(IntEnum):
    """What a rank is about when it sends."""

    ATTACH = 0
    CONFIGURE = 1
    BYPASS = 2
    RESUME = 3
    BEGIN = 4
    STEP = 5


_WORDS = {
    Doing.ATTACH: "attach()",
    Doing.CONFIGURE: "configure() before step {step}",
    Doing.BYPASS: "bypass() before step {step}",
    Doing.RESUME: "resume() before step {step}",
    Doing.BEGIN: "step {step}, its beginning, soon after attach() or load_state_dict()",
    Doing.STEP: "step {step}, exchange {exchange}",
}
_ALIKE = {Doing.BYPASS: Doing.CONFIGURE, Doing.RESUME: Doing.CONFIGURE}


class Place(NamedTuple):
    """Where a rank is in the program."""

    doing: Doing
    step: int
    exchange: int  # of the step, from 1; 0 outside of steps

    def __str__(self) -> str:
        return _WORDS[self.doing].format(step=self.step, exchange=self.exchange)


class Heading(NamedTuple):
    """Of a message between two ranks."""

    call: int
    place: Place
    length: int  # bytes to the receiver
    longest: int  # bytes to anyone

    def write(self, out: Bytes) -> None:
        out.view(np.int64)[:] = (_MAGIC, self.call, *self.place, self.length, self.longest)

    @staticmethod
    def read(data: Bytes, most: int) -> "Heading | None":
        """None if no heading of ours can look like this: no message is longer than `most`."""
        magic, call, doing, step, exchange, length, longest = data.view(np.int64).tolist()
        sane = 0 <= doing < len(Doing) and 0 <= length <= longest <= most
        if magic != _MAGIC or not sane:
            return None
        return Heading(call, Place(Doing(doing), step, exchange), length, longest)


def differences(places: Sequence[Place], names: Sequence[int]) -> str:
    """Empty if all ranks are at the same place; otherwise who does what, and what to do.

    Ranks that change different things are at the same place: they compare their changes next.
    """
    if len({place._replace(doing=_ALIKE.get(place.doing, place.doing)) for place in places}) <= 1:
        return ""
    by_rank = "; ".join(f"rank {name}: {place}" for name, place in zip(names, places, strict=True))
    if {place.doing for place in places} == {Doing.BEGIN}:
        return f"the ranks loaded states of different steps, load those of one step: {by_rank}"
    return (
        f"the ranks are at different places of the program: {by_rank}. Call attach, configure, "
        "bypass, resume, load_state_dict, detach and backward on all ranks, in the same order"
    )
