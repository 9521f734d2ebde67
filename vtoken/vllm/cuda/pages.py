"""What attention reads in every step: page tables at page size 1, and physical lengths.

A block table of page size S over [N, S] blocks and one of page size 1 over [N * S, 1] slots address
the same memory; only the second can skip holes. `inputs` fills these tables anew in every step.
Captured graphs read them, so they are allocated once and never move.
"""

from __future__ import annotations

import torch

ROW_ALIGNMENT = 16  # entries; attention's and our kernels then load whole vectors of a row
# Of a launch that fills the tables: facts by row of the batch, 0 in positional rows and in padding.
HEADER = (
    "live",  # tokens that attention reads, those of this step included
    "old",  # those before this step
    "kept",  # how many of the row's first slots are resident; the others are sent
    "source",  # the slot of column i is `sent[source + i]`
    "token",  # column i is token `token + i` of the batch
    "resident",  # the row of `resident`
)


class PageTables:
    """The tables of one worker, for batches of at most `num_rows` requests.

    `pages` [num_rows, width] int32: slots by row of the batch. `seq_lens` [num_rows] int32: how
    many of a row attention reads. `resident` [num_rows, width] int32: rows that stay on the device,
    by row of the mirrors. `width`: `max_length` tokens, rounded up.
    """

    def __init__(self, num_rows: int, max_length: int, device: torch.device) -> None:
        width = -(-max_length // ROW_ALIGNMENT) * ROW_ALIGNMENT
        shape = (num_rows, width)
        self.pages = torch.zeros(shape, dtype=torch.int32, device=device)
        self.resident = torch.zeros(shape, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def slots(self, row: int, num_live: int) -> torch.Tensor:
        """The first `num_live` slots of a row of the batch, int32, until the next step."""
        return self.pages[row, :num_live]

    def clear(self, seq_lens: torch.Tensor) -> None:
        """Inputs of a dummy batch with these lengths [R], whose tokens are all in slot 0."""
        self.pages[: len(seq_lens)].zero_()
        self.seq_lens[: len(seq_lens)].copy_(seq_lens)
