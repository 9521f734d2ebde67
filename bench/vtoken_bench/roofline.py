"""What the checks of docs/gpu.md should measure, calculated before any of them has run on a GPU.

A prediction is the bytes that a check has to move, divided by what a large copy reaches. It knows
no launch time, no cache and no latency: sizes that fit a GPU's second cache are faster, and calls
that move little are slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# Nominal GB/s of the memory, from NVIDIA's data sheets, and the share that a large copy reaches.
MEMORY_GBS = {"A100": 2039, "H100": 3350, "H200": 4800}
SHARE = 0.9
LAYERS, HEADS, QUERY_HEADS, DIM, ITEM_BYTES = 32, 8, 32, 128, 2  # Llama-3.1-8B in bfloat16
ROW_BYTES = HEADS * 2 * DIM * ITEM_BYTES  # K and V of a token in a layer
PAGE_BYTES = 4  # of a page table, a token
LOGIT_BYTES = 4 * QUERY_HEADS  # of the score probe, a token


@dataclass(frozen=True, slots=True)
class Prediction:
    """`num` tokens of `token_bytes` in a call. `check`, `what`: which row of which check."""

    check: str
    what: str
    num: int
    token_bytes: int

    def us(self, memory_gbs: float) -> float:
        return self.num * self.token_bytes / (memory_gbs * SHARE * 1e3)


def predictions() -> Iterator[Prediction]:
    for batch, context in ((1, 16384), (16, 8192), (64, 8192)):
        what = f"attention, {batch} of {context:,} tokens"
        yield Prediction("1", f"{what}, page 16", batch * context, ROW_BYTES)
        yield Prediction("1", f"{what}, page 1", batch * context, ROW_BYTES + PAGE_BYTES)
    for tokens in (4096, 65536):
        yield Prediction("3", f"{tokens:,} tokens, {LAYERS} layers", tokens, 2 * LAYERS * ROW_BYTES)
    probe = ROW_BYTES // 2 + PAGE_BYTES + 2 * LOGIT_BYTES + 8  # logits and scores: write and read
    for batch, context in ((1, 8192), (16, 8192), (64, 8192)):
        yield Prediction("5", f"score probe, {batch} of {context:,} tokens", batch * context, probe)
