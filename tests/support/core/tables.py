"""The paper's calls for one request, over the columns that `TokenTables` takes for many."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vtoken.base.arrays import Ints, Ragged
from vtoken.base.errors import InvariantViolation
from vtoken.core.tables import kernels
from vtoken.core.tables.token_tables import TokenTables


def sync_new_tokens(
    tables: TokenTables, request_id: str, block_ids: Sequence[int], total_len: int
) -> Ints:
    """Register new tokens, with a table for a new request; returns their slots.

    `block_ids` is the request's entire block table, `total_len` all its tokens, dead ones included.
    """
    table = tables.get(request_id) or tables.add(request_id)
    added = np.asarray(block_ids[table.num_blocks :], dtype=np.int64)
    rows, totals = np.array([table.row]), np.array([total_len])
    return tables.grow(rows, totals, Ragged.joined([added])).slots


def evict_tokens(tables: TokenTables, request_id: str, token_ids: Sequence[int] | Ints) -> None:
    """Mark tokens dead, in any order; all or nothing."""
    row = np.array([tables[request_id].row])
    ids = np.sort(np.asarray(token_ids, dtype=np.int64))
    codes, _ = tables.evict(row, Ragged.joined([ids]), np.array([-1]), Ragged.empty(1))
    if codes[0] != kernels.DONE:
        raise InvariantViolation("I2", f"victims of {request_id}: code {codes[0]}")


def hole_of(tables: TokenTables, request_id: str) -> int:
    """The place of the next single token; -1: behind the last one."""
    return int(tables.columns.hole[tables[request_id].row])


def index_of(tables: TokenTables, request_id: str) -> Ints:
    """A request's row of the column `index_of`, to read or to damage."""
    columns, table = tables.columns, tables[request_id]
    first = int(columns.first_token[table.row])
    index: Ints = columns.arrays.index_of[first : first + table.num_tokens]
    return index
