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

import msgspec
import numpy as np

from vtoken.core.protocol.mirror import Mirror
from vtoken.core.protocol.step import StepPlan

MIRRORS_A_STEP = 4


_ENCODER = msgspec.msgpack.Encoder(
    enc_hook=lambda array: np.ascontiguousarray(array).data, order="deterministic"
)


def of_plan(plan: StepPlan) -> int:
    """CRC-32 of everything in `plan`, as msgpack."""
    return crc32(_ENCODER.encode(plan))


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
