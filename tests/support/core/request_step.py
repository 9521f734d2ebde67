"""One request's part of a step: the columns of `RequestSteps`, request by request."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from vtoken.base.arrays import Ints, Ragged
from vtoken.core.protocol.step import NO_IDS, RequestSteps, Retained


class RequestStep(msgspec.Struct):
    """One request's part of a step; `blocks`: None if the block table was not rewritten."""

    num_tokens: int
    evicted: Ints = NO_IDS
    moved_ids: Ints = NO_IDS
    moved_slots: Ints = NO_IDS
    restored_ids: Ints = NO_IDS
    restored_slots: Ints = NO_IDS
    retained: Retained | None = None
    blocks: list[int] | None = None
    new_slots: Ints = NO_IDS
    num_live: int = 0
    dense: bool = True
    scratch: list[int] = msgspec.field(default_factory=list)


def part_of(steps: RequestSteps, name: str) -> RequestStep:
    """One request's part, as views; raises ValueError for a request that is not included."""
    i = steps.names.index(name)
    return RequestStep(
        int(steps.num_tokens[i]),
        steps.evicted.of(i),
        steps.moved_ids.of(i),
        steps.moved_slots.of(i),
        steps.restored_ids.of(i),
        steps.restored_slots.of(i),
        steps.retained.get(name),
        steps.blocks[name].tolist() if name in steps.blocks else None,
        steps.new_slots.of(i),
        int(steps.num_live[i]),
        bool(steps.dense[i]),
        steps.scratch.of(i).tolist(),
    )


def parts_of(steps: RequestSteps) -> dict[str, RequestStep]:
    """Every request's part."""
    return {name: part_of(steps, name) for name in steps.names}


def steps_of(parts: Mapping[str, RequestStep]) -> RequestSteps:
    """The columns of `parts`, in their order."""
    each = list(parts.values())
    moved_ids = Ragged.joined(part.moved_ids for part in each)
    moved_slots = Ragged.joined(part.moved_slots for part in each)
    restored_ids = Ragged.joined(part.restored_ids for part in each)
    restored_slots = Ragged.joined(part.restored_slots for part in each)
    return RequestSteps(
        list(parts),
        np.array([part.num_tokens for part in each], dtype=np.int64),
        np.array([part.num_live for part in each], dtype=np.int64),
        np.array([part.dense for part in each], dtype=np.bool_),
        Ragged.joined(part.evicted for part in each),
        moved_ids,
        Ragged(moved_slots.values, moved_ids.starts),
        restored_ids,
        Ragged(restored_slots.values, restored_ids.starts),
        Ragged.joined(part.new_slots for part in each),
        Ragged.joined(part.scratch for part in each),
        {
            name: np.array(part.blocks, dtype=np.int64)
            for name, part in parts.items()
            if part.blocks is not None
        },
        {name: part.retained for name, part in parts.items() if part.retained is not None},
    )
