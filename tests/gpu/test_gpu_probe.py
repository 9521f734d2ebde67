"""Check 5 of docs/gpu.md: the score probe's kernel equals plain torch."""

from __future__ import annotations

import torch

from vtoken_bench.checks import probe


def test_probed_scores_equal_plain_torch(cuda: torch.device) -> None:
    for row in probe.run(cuda, batches=(1, 16), contexts=(2048,))["rows"]:
        assert row["max_error"] < 1e-4, row
