"""The colour modes of the heatmap: live slots, owner or state.

A mode maps the newest state to a share 0..1, or a kind, for each block. N blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vtoken.wire.reducer import StreamState
    from vtoken_console.style.cells import F32, U8, U16


class Mode(Enum):
    UTILISATION = "live slots"
    OWNER = "request"
    STATE = "state"

    @property
    def is_kind(self) -> bool:
        """Whether the colour shows a kind, not an amount."""
        return self is not Mode.UTILISATION

    @property
    def summary(self) -> str:
        return {
            Mode.UTILISATION: "live slots of a block",
            Mode.OWNER: "the request that holds a block, by its letter in the table",
            Mode.STATE: ", ".join(kind.word for kind in STATE_KINDS),
        }[self]


class StateKind(NamedTuple):
    """`hue`: of `Theme.hues`; calm for what is normal, warm for what is wasted."""

    letter: str
    word: str
    hue: int


# The kinds of Mode.STATE in order of precedence. 0 is mixed.
STATE_KINDS = (
    StateKind("*", "moving", 5),
    StateKind("s", "shared", 3),
    StateKind("c", "in prefix cache", 1),
    StateKind("f", "being filled", 7),
    StateKind("x", "nothing live", 2),
    StateKind("l", "at most half live", 6),
    StateKind("u", "used", 1),
)
MODES = tuple(Mode)


@dataclass(frozen=True, slots=True)
class Coloured:
    """`share` [N] for an amount, `kind` [N] (1 or more) for a kind; the other is None."""

    share: F32 | None = None
    kind: U16 | None = None


def colour(mode: Mode, model: StreamState, part: slice) -> Coloured:
    """The shares or kinds of the blocks of `part` in `mode`."""
    import numpy as np

    from vtoken_console.style import cells

    live, flags = model.live[part], model.flags[part]
    if mode is Mode.OWNER:
        owner = model.owner[part] if len(model.owner) else np.zeros(len(live), np.uint16)
        return Coloured(kind=np.maximum(owner, 1).astype(np.uint16))
    if mode is Mode.STATE:
        return Coloured(kind=state_kinds(live, flags, model.block_size))
    return Coloured(cells.live_share(live, model.block_size))


def state_kinds(live: U16, flags: U8, block_size: int) -> Any:
    """1 + the index in STATE_KINDS of every block [N]."""
    import numpy as np

    from vtoken_console.style.cells import STATES

    out = np.full(len(live), len(STATE_KINDS), np.uint16)
    out[STATES["low"](live, flags, block_size)] = 6
    out[live == 0] = 5
    for kind, state in ((4, "filling"), (3, "cached"), (2, "shared"), (1, "moving")):
        out[STATES[state](live, flags, block_size)] = kind
    return out
