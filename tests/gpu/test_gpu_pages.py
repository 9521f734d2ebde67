"""Checks 1 and 2 of docs/gpu.md: exact at page size 1, and the same bits for any placement."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
