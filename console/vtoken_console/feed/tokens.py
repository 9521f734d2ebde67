"""The token table of one request as arrays, and its reduction to cells in logical order.

T tokens; a token's id is its index in every array. A reduction needs at least one token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vtoken import wire
from vtoken_console.style.cells import F32, Ints

NOWHERE = -1  # block of a dead token whose slot was reclaimed or recycled


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """`position` [T], `block` [T] (NOWHERE), `offset` [T], `live` [T], `parked` [T] (not live, with
    a copy), `score` [T] (NaN: none), `protected` [T].
    """

    step: int
    position: Ints
    block: Ints
    offset: Ints
    live: npt.NDArray[np.bool_]
    parked: npt.NDArray[np.bool_]
    score: F32
    protected: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.live)

    def state(self, token: int) -> str:
        """`live`, `dead`, `parked`."""
        return "live" if self.live[token] else "parked" if self.parked[token] else "dead"

    @property
    def has_scores(self) -> bool:
        return not bool(np.isnan(self.score).all())


def from_pages(pages: Iterable[wire.TokenPage]) -> TokenTable:
    """Joins consecutive pages; the step is the newest page's."""
    pages = list(pages)
    rows = [row for page in pages for row in page.rows]
    return TokenTable(
        step=max((page.step for page in pages), default=0),
        position=np.array([r.position for r in rows], np.int64),
        block=np.array([NOWHERE if r.block is None else r.block for r in rows], np.int64),
        offset=np.array([NOWHERE if r.offset is None else r.offset for r in rows], np.int64),
        live=np.array([r.live for r in rows], bool),
        parked=np.array([r.parked for r in rows], bool),
        score=np.array([np.nan if r.score is None else r.score for r in rows], np.float32),
        protected=np.array([r.protected for r in rows], bool),
    )


def live_share(table: TokenTable, per_cell: int) -> F32:
    """Mean live share of every cell of `per_cell` tokens [ceil(T / per_cell)]."""
    starts = np.arange(0, len(table), per_cell)
    sums = np.add.reduceat(table.live.astype(np.float32), starts)
    sizes = np.diff(np.append(starts, len(table)))
    share: F32 = (sums / sizes).astype(np.float32)
    return share


def mostly_parked(table: TokenTable, per_cell: int) -> npt.NDArray[np.bool_]:
    """For every cell of `per_cell` tokens [ceil(T / per_cell)], whether at least half of its dead
    tokens are parked.
    """
    starts = np.arange(0, len(table), per_cell)
    dead = np.add.reduceat(~table.live, starts, dtype=np.int64)
    parked = np.add.reduceat(table.parked, starts, dtype=np.int64)
    most: npt.NDArray[np.bool_] = (parked > 0) & (2 * parked >= dead)
    return most


def any_protected(table: TokenTable, per_cell: int) -> npt.NDArray[np.bool_]:
    """For every cell of `per_cell` tokens [ceil(T / per_cell)], whether any token is protected."""
    starts = np.arange(0, len(table), per_cell)
    found: npt.NDArray[np.bool_] = np.logical_or.reduceat(table.protected, starts)
    return found


def score_rank(table: TokenTable, per_cell: int) -> F32:
    """The highest rank 0..1 of a cell's live scored tokens; NaN if it has none."""
    rank = np.nan_to_num(score_ranks(table.live, table.score), nan=-1)
    starts = np.arange(0, len(table), per_cell)
    best = np.maximum.reduceat(rank, starts)
    best[best < 0] = np.nan
    return best


def score_ranks(live: npt.NDArray[np.bool_], score: F32) -> F32:
    """The rank 0..1 of each token [T] among live scored tokens; NaN for all others."""
    rank = np.full(len(score), np.nan, np.float32)
    scored = np.flatnonzero(live & ~np.isnan(score))
    order = scored[np.argsort(score[scored], kind="stable")]
    rank[order] = np.linspace(0, 1, len(order), dtype=np.float32)
    return rank
