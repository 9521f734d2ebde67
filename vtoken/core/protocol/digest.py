"""Fingerprints of a step's plan and of mirrors, by which ranks compare what they execute.

Independent of ranks and torch. Equal plans give equal fingerprints; a difference in any number, its
position or the order of requests is detected with probability 1 - 2^-32.

A fingerprint covers the entire plan. A mirror has one entry per token ever written, so each step
covers only `MIRRORS_A_STEP` mirrors of the plan's requests, in rotation. Wrong plans and wrong
counts are detected at once, a mirror that drifted otherwise when its turn comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

import numpy as np

from vtoken.base.arrays import Ragged
from vtoken.core.protocol.mirror import Mirror
from vtoken.core.protocol.step import StepPlan
from vtoken.policies.signals import Signal

MIRRORS_A_STEP = 4


def of_plan(plan: StepPlan) -> int:
    """CRC-32 of everything in `plan`."""
    requests = plan.requests
    number: dict[Signal, int] = {}  # many requests share a signal: hash it once
    kept = [
        (name, *(number.setdefault(signal, len(number)) for signal in signals))
        for name, signals in plan.signals.items()
    ]
    wanted = [(name, number.setdefault(signal, len(number))) for name, signal in plan.want_scores]
    texts = (
        repr((wanted, kept, [*number])),
        *("\0".join(names) for names in (sorted(plan.probed), requests.names)),
        *("\0".join(names) for names in (requests.blocks, requests.retained)),
    )
    columns = [plan.source_slots, plan.destination_slots]
    columns += [requests.num_tokens, requests.num_live, requests.dense.astype(np.int64)]
    ragged = (
        *(requests.evicted, requests.moved_ids, requests.moved_slots, requests.new_slots),
        *(requests.scratch, Ragged.joined(requests.blocks.values())),
    )
    for column in ragged:
        columns += column.starts, column.values
    for retained in requests.retained.values():
        columns += retained.ids, retained.slots
    counts = [plan.step, *map(len, columns)]
    digest = crc32("\n".join(texts).encode())
    digest = crc32(np.array(counts, dtype=np.int64).data, digest)
    return crc32(np.concatenate(columns).data, digest)


def of_mirrors(plan: StepPlan, mirrors: Mapping[str, Mirror]) -> int:
    """CRC-32 of this step's share of the mirrors of the plan's requests, after the step."""
    names = [name for name in plan.requests.names if name in mirrors]
    if not names:
        return 0
    first = plan.step * MIRRORS_A_STEP % len(names)
    digest = 0
    for name in (names[first:] + names[:first])[:MIRRORS_A_STEP]:
        for array in mirrors[name].live():
            digest = crc32(array.data, digest)
    return digest
