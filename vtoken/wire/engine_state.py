"""The state of an engine as its readers see it, and the difference between two states.

The engine publishes frames, the API sends its clients snapshots and deltas, and clients and
recordings apply those. A difference is the same everywhere; only its fields have other names.
Numpy is loaded with the first arrays. Invariants:
1. before.after(Difference.between(before, after)) == after
2. any.after(Difference.whole(state)) == state
3. a state's arrays, of N blocks each, are replaced, never written
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vtoken.wire.bus import BLOCK_ARRAYS, Frame
from vtoken.wire.doc import PackedArray, pack_array, unpack_array
from vtoken.wire.documents import RequestRow
from vtoken.wire.settings import ConfigDocument
from vtoken.wire.status import Status
from vtoken.wire.stream import Delta, Snapshot

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    # By the names of `BLOCK_ARRAYS`; one that the engine does not report is absent.
    Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class EngineState:
    """The blocks of one engine at `step`, and its newest status, which carries its own step."""

    step: int = 0
    blocks: Arrays = field(default_factory=dict)
    requests: Mapping[str, RequestRow] = field(default_factory=lambda: MappingProxyType({}))
    status: Status | None = None
    config: ConfigDocument | None = None
    engine: int = 0

    def after(self, difference: Difference) -> EngineState:
        """This state with `difference`; raises ValueError or IndexError if arrays do not fit."""
        blocks, requests = self.blocks, self.requests
        if difference.block_ids is None:
            blocks = difference.blocks or blocks
        elif len(difference.block_ids):
            blocks = {name: array.copy() for name, array in blocks.items()}
            difference.write(blocks)
        if difference.removed is None:
            if difference.requests is not None:
                requests = MappingProxyType({row.id: row for row in difference.requests})
        elif difference.requests or difference.removed:
            rows = dict(requests)
            for key in difference.removed:
                rows.pop(key, None)
            rows |= {row.id: row for row in difference.requests or ()}
            requests = MappingProxyType(rows)
        return replace(
            self,
            step=difference.step,
            blocks=blocks,
            requests=requests,
            status=difference.status or self.status,
            config=difference.config or self.config,
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs from one state to the next; None, or no `blocks`, if nothing does.

    `blocks`: arrays [k] of the blocks `block_ids` [k], ascending; without ids, all arrays [N].
    `requests`: the rows that differ, beside the ids `removed`; without those, the rows of all.
    """

    step: int
    blocks: Arrays = field(default_factory=dict)
    block_ids: npt.NDArray[np.uint32] | None = None
    requests: Sequence[RequestRow] | None = None
    removed: Sequence[str] | None = None
    status: Status | None = None
    config: ConfigDocument | None = None

    @classmethod
    def whole(cls, state: EngineState) -> Difference:
        """The difference from any state to `state`."""
        rows = [*state.requests.values()]
        return cls(state.step, state.blocks, None, rows, None, state.status, state.config)

    @classmethod
    def between(cls, before: EngineState, after: EngineState) -> Difference:
        """The difference from `before` to `after`, which has the same arrays."""
        ids = _changed(before.blocks, after.blocks) if after.blocks else None
        parts = {} if ids is None else {name: array[ids] for name, array in after.blocks.items()}
        rows, known = after.requests, before.requests
        return cls(
            after.step,
            parts,
            ids,
            [row for key, row in rows.items() if known.get(key) != row],
            [key for key in known if key not in rows],
            None if after.status == before.status else after.status,
            None if after.config == before.config else after.config,
        )

    @classmethod
    def of(cls, message: Frame | Snapshot | Delta) -> Difference:
        """The difference in a message; rows of a frame or snapshot are those of all requests."""
        rows: Sequence[RequestRow] | None
        removed: Sequence[str] | None
        ids: PackedArray | None
        if isinstance(message, Delta):
            ids, prefix = message.block_ids or b"", "block_"
            rows, removed = message.requests_changed or (), message.requests_removed or ()
        else:
            ids, prefix = None, ""
            rows, removed = message.requests, None
        packed = {name: getattr(message, prefix + name) for name, _ in BLOCK_ARRAYS}
        return cls(
            message.step,
            {name: unpack_array(packed[name], of) for name, of in BLOCK_ARRAYS if packed[name]},
            None if ids is None else unpack_array(ids, "<u4"),
            rows,
            removed,
            message.status,
            message.config,
        )

    def write(self, blocks: Arrays) -> None:
        """Write this difference of some blocks to the arrays `blocks` [N] themselves."""
        for name, array in blocks.items():
            if name in self.blocks:
                array[self.block_ids] = self.blocks[name]

    def as_snapshot(self, *, packed: bool) -> dict[str, Any]:
        """The fields of a `Snapshot`, from a whole difference."""
        arrays = {name: pack_array(a, packed=packed) for name, a in self.blocks.items()}
        return {
            "status": self.status,
            "config": self.config,
            "requests": self.requests,
            **{name: arrays.get(name) for name, _ in BLOCK_ARRAYS},
        }

    def as_delta(self, *, packed: bool) -> dict[str, Any]:
        """The fields of a `Delta`; {} if nothing differs."""
        fields: dict[str, Any] = {
            "requests_changed": self.requests,
            "requests_removed": self.removed,
            "status": self.status,
            "config": self.config,
        }
        if self.block_ids is not None and len(self.block_ids):
            arrays = {"ids": self.block_ids, **self.blocks}
            fields |= {f"block_{n}": pack_array(a, packed=packed) for n, a in arrays.items()}
        return {name: value for name, value in fields.items() if value}


def _changed(before: Arrays, now: Arrays) -> npt.NDArray[np.uint32]:
    """Ids of the blocks [k] that differ in an array, ascending."""
    import numpy as np

    changed = np.zeros(len(now["live"]), dtype=bool)
    for name, array in now.items():
        changed |= before[name] != array
    return np.flatnonzero(changed).astype("<u4")
