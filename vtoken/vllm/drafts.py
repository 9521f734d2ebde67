"""Drafts of speculative decoding: how many of a step's were rejected.

A step computes a request's newest token and its drafts. It samples one token behind the drafts that
it accepts; vLLM takes the others back, and so do the token tables and the worker's mirrors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NO_DRAFTS: Mapping[str, int] = {}


def num_drafts(scheduler_output: Any) -> dict[str, int]:
    """The drafts of each request that has any in this step."""
    drafts: Mapping[str, Sequence[int]] = scheduler_output.scheduled_spec_decode_tokens
    return {name: len(tokens) for name, tokens in drafts.items()}


def num_rejected(drafts: Mapping[str, int], output: Any) -> dict[str, int]:
    """How many of the step's `drafts` were rejected, by request; `output`: of the same step.

    A request that sampled nothing has none: vLLM takes nothing back.
    """
    sampled, index = output.sampled_token_ids, output.req_id_to_index
    found = {name: len(sampled[index[name]]) if sampled else 0 for name in drafts}
    return {name: drafts[name] - num + 1 for name, num in found.items() if num}
