"""`kernels.fill_tables` in plain Python: an oracle, and for devices that have no Triton."""

from __future__ import annotations

import torch

from vtoken.vllm.cuda.pages import HEADER, PageTables


def fill_tables(
    header: torch.Tensor,
    sent: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    tables: PageTables,
    slot_mapping: torch.Tensor,
    *,
    block_size: int,
    width: int,
) -> None:
    fill(
        *(header, sent, block_table, lengths, tables.resident, tables.pages, tables.seq_lens),
        *(slot_mapping, block_size, width),
    )


def fill(
    header: torch.Tensor,
    sent: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    resident: torch.Tensor,
    pages: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
    width: int,
) -> None:
    """One row after another, a column after another."""
    for row, facts in enumerate(header.view(len(HEADER), -1)[:, : len(lengths)].T.tolist()):
        live, old, kept, source, token, own = facts
        seq_lens[row] = length = live or int(lengths[row])
        if length > width:
            raise IndexError(f"row {row} has {length} tokens, at most {width} were announced")
        for column in range(length):
            if not live:
                block = int(block_table[row, column // block_size])
                slot = block * block_size + column % block_size
            elif column < kept:
                slot = int(resident[own, column])
            else:
                slot = int(sent[source + column])
                resident[own, column] = slot
            pages[row, column] = slot
            if live and column >= old:
                slot_mapping[token + column] = slot
