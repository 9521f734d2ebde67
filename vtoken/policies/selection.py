"""Choosing victims by age or by score, for one view and for the views of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vtoken.base.arrays import Ints, Ragged
from vtoken.policies.view import TokenIds, View


def oldest(view: View, sinks: int) -> TokenIds:
    """The `num_victims` oldest ids, sparing the first `sinks`."""
    first = int(np.searchsorted(view.token_ids, sinks))
    return view.token_ids[first : first + view.num_victims]


def lowest(view: View, scores: npt.NDArray[Any], sinks: int, recent: int) -> TokenIds:
    """The `num_victims` lowest-scored ids, sparing the first `sinks` and the `recent` newest.

    `scores` [n], higher = keep; NaN ranks highest; of equal scores the older token is evicted.
    """
    from vtoken.policies.kernels import DIGITS, lowest_scores  # loads Numba

    first = int(np.searchsorted(view.token_ids, sinks))
    last = max(first, len(view.token_ids) - max(recent, 1))
    window = scores[first:last]
    if window.dtype != np.float32:  # ranks are exact in float32
        window = np.unique(window, return_inverse=True)[1]
    ids, keys = np.array(view.token_ids[first:last]), np.empty(last - first, dtype=np.uint32)
    out, count = np.empty(len(ids), dtype=np.int64), np.empty(DIGITS, dtype=np.int64)
    values = np.array(window, dtype=np.float32)
    return out[: lowest_scores(ids, values, view.num_victims, keys, count, out)]


class ViewBatch:
    """Requests given as views; a `Batch`. `budget` [k]: the tokens that each keeps."""

    def __init__(self, views: Sequence[View]) -> None:
        self._views = views
        self.budget: Ints = np.array([view.budget_tokens for view in views], dtype=np.int64)

    def views(self) -> Iterator[View]:
        return iter(self._views)

    def oldest(self, sinks: int) -> Ragged:
        return Ragged.joined(oldest(view, sinks) for view in self._views)

    def lowest(self, sinks: int, recent: int | Ints) -> Ragged:
        each = np.broadcast_to(recent, len(self._views)).tolist()
        return Ragged.joined(
            lowest(view, view.scores, sinks, own)
            for view, own in zip(self._views, each, strict=True)
        )
