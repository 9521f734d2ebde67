"""What a policy sees: one request, or the requests that are due together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from vtoken.base.arrays import Bools, Floats, Ints, Ragged

TokenIds = Ints  # the name in the interface of policies


@dataclass(slots=True)
class View:
    """One request between two steps, after its last scheduled step. Its arrays are read-only: copy
    an array before sorting it in place.

    `token_ids` [n]: ids of the live tokens, ascending; a token's id is its RoPE position.
    `num_tokens`: tokens ever computed, dead ones included; the newest has id `num_tokens - 1`.
    `seed`: a number that depends on the prompt alone.
    `scores` [n] float32: the policy's signal, higher = keep, inf for tokens that were appended or
    came back after the last probe. Empty unless the policy has a signal.
    `vocabulary_ids` [n]; `special`, `punctuation` [n]: the tokens' kinds according to the model's
    tokenizer. Empty unless the policy needs "token_ids".
    `profile`: the return value of the policy's `profile` for this request.
    """

    token_ids: TokenIds
    num_tokens: int
    num_prompt_tokens: int
    budget_tokens: int
    seed: int = 0
    scores: Floats = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    vocabulary_ids: TokenIds = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    special: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    punctuation: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    profile: Any = None

    @property
    def num_victims(self) -> int:
        return max(0, len(self.token_ids) - self.budget_tokens)


class Batch(Protocol):
    """The k requests that are due for eviction at once; each keeps `budget` [k] tokens."""

    budget: Ints

    def views(self) -> Iterator[View]:
        """The view of each request, in order."""

    def oldest(self, sinks: int) -> Ragged:
        """The victims that `oldest` chooses in each request."""

    def lowest(self, sinks: int, recent: int | Ints) -> Ragged:
        """The victims that `lowest` chooses in each request by its scores.

        `recent`: one number for all requests, or one for each [k].
        """
