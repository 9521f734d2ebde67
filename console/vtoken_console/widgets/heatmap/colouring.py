"""The colour modes of the heatmap: utilisation, age, owner, churn or state.

A mode maps the newest state to a share 0..1, or a kind, for each block. N blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vtoken.wire.reducer import StreamState
    from vtoken_console.feed.activity import Activity
    from vtoken_console.style.cells import F32, U8, U16, Mask

AGE_S = (0.5, 600.0)  # the ends of the age scale
CHURN_PER_S = (0.05, 10.0)  # the ends of the churn scale


class Mode(Enum):
    UTILISATION = "utilisation"
    AGE = "age"
    OWNER = "owner"
    CHURN = "churn"
    STATE = "state"

    @property
    def is_kind(self) -> bool:
        """Whether the colour shows a kind, not an amount."""
        return self in (Mode.OWNER, Mode.STATE)

    @property
    def summary(self) -> str:
        return {
            Mode.UTILISATION: "live slots of a block",
            Mode.AGE: "time since the last change that this console saw",
            Mode.OWNER: "the request that holds a block",
            Mode.CHURN: "changes of a block a second",
            Mode.STATE: "free, low, shared, hashed, in flight, tail",
        }[self]


MODES = tuple(Mode)

# The kinds of Mode.STATE in order of precedence: (letter, word). 0 is mixed.
STATE_KINDS: tuple[tuple[str, str], ...] = (
    ("*", "in flight"),
    ("s", "shared"),
    ("h", "hashed"),
    ("t", "tail"),
    ("x", "nothing live"),
    ("l", "at most half live"),
    ("u", "used"),
)


@dataclass(frozen=True, slots=True)
class Coloured:
    """`share` [N] for an amount, `kind` [N] (1 or more) for a kind; the other is None."""

    share: F32 | None = None
    kind: U16 | None = None
    worst_is_high: bool = False
    exact_ends: bool = False


def colour(mode: Mode, model: StreamState, activity: Activity, part: slice) -> Coloured:
    """The shares or kinds of the blocks of `part` in `mode`."""
    import numpy as np

    from vtoken_console.style import cells

    live, flags = model.live[part], model.flags[part]
    if mode is Mode.AGE:
        share = cells.log_share(activity.age_s()[part], *AGE_S)
        return Coloured(share, worst_is_high=True)
    if mode is Mode.CHURN:
        share = cells.log_share(activity.churn_per_s()[part], *CHURN_PER_S)
        return Coloured(share, worst_is_high=True)
    if mode is Mode.OWNER:
        owner = model.owner[part] if len(model.owner) else np.zeros(len(live), np.uint16)
        return Coloured(kind=np.maximum(owner, 1).astype(np.uint16))
    if mode is Mode.STATE:
        return Coloured(kind=state_kinds(live, flags, model.block_size))
    return Coloured(cells.live_share(live, model.block_size), exact_ends=True)


def state_kinds(live: U16, flags: U8, block_size: int) -> Any:
    """1 + the index in STATE_KINDS of every block [N]."""
    import numpy as np

    from vtoken_console.style.cells import in_state

    out = np.full(len(live), len(STATE_KINDS), np.uint16)
    low: Mask = in_state(live, flags, block_size, "low")
    tests = (
        (6, low),
        (5, live == 0),
        (4, in_state(live, flags, block_size, "tail")),
        (3, in_state(live, flags, block_size, "hashed")),
        (2, in_state(live, flags, block_size, "shared")),
        (1, in_state(live, flags, block_size, "flight")),
    )
    for kind, found in tests:
        out[found] = kind
    return out
