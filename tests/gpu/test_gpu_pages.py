"""Checks 1 and 2 of docs/gpu.md: exact at page size 1, and the same bits for any placement.

The page tables of a step are compared with the kernel in plain Python.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import filled
from vtoken.vllm.cuda.pages import HEADER, PageTables
from vtoken_bench.checks import pages


@pytest.fixture(scope="module")
def rows(cuda: torch.device) -> Any:
    found = pages.run(cuda, batches=(1, 16), contexts=(2048,))
    assert found["failed"] == {}
    return found["rows"]


def test_attention_at_page_size_one_equals_the_oracle(rows: Any) -> None:
    assert all(row["max_error"] < 2e-2 for row in rows), rows  # bfloat16


def test_attention_is_bit_for_bit_the_same_for_any_token_placement(rows: Any) -> None:
    assert all(row["equal_bits_scattered"] for row in rows), rows


def test_page_tables_lengths_and_slots_equal_plain_pythons(cuda: torch.device) -> None:
    """Rows whose slots are sent or kept, of one tile or more, a positional one, and padding."""
    from vtoken.vllm.cuda.kernels import fill_tables

    torch.manual_seed(0)
    size, lengths = 16, [2050, 1, 1024, 700, 0]
    header = torch.zeros(len(HEADER), len(lengths), dtype=torch.int32)
    header[:, 0] = torch.tensor([2050, 2049, 0, 0, -2049, 3])  # sent whole
    header[:, 1] = torch.tensor([1, 0, 0, 2050, 1, 1])
    header[:, 2] = torch.tensor([1024, 1020, 1020, 2051 - 1020, 2 - 1020, 4])  # four new tokens
    sent = torch.randint(1, 9999, (2055,), dtype=torch.int32)
    blocks = torch.randint(1, 600, (len(lengths), 160), dtype=torch.int32)
    counts = torch.tensor([9, 9, 9, 700, 0], dtype=torch.int32)
    held = torch.randint(1, 9999, (len(lengths), 2064), dtype=torch.int32)

    def made(device: str, fill: Any) -> list[torch.Tensor]:
        tables = PageTables(len(lengths), 2050, torch.device(device))
        tables.resident.copy_(held)
        mapping = torch.full((7,), -1, device=device)
        given = [part.to(device) for part in (header, sent, blocks, counts)]
        fill(*given, tables, mapping, block_size=size, width=2050)
        found = (tables.pages, tables.resident, tables.seq_lens, mapping)
        return [part.cpu() for part in found]

    expected = made("cpu", filled.fill_tables)
    assert expected[2].tolist() == lengths
    for found, want in zip(made("cuda", fill_tables), expected, strict=True):
        assert torch.equal(found, want)
