"""The soak's judge: what a model would have said whose attention sees exactly the live tokens.

Knows the model in Hugging Face transformers, what was sampled and when which token died; knows
nothing of blocks, caches or vLLM. One masked forward pass over the whole sequence, teacher-forced:
query q sees token k iff k <= q and k had not been evicted when q was computed. So every sampled
token is judged by itself, and a difference in the last digit of a logit never cascades.

A request that was preempted has one `Stretch` for each admission: what it knew when it was
(re)admitted was computed in full context.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(slots=True)
class Stretch:
    """One admission: `known` tokens existed at its start; `evictions` are (num_tokens, ids): from
    query `num_tokens` on, `ids` are invisible.
    """

    known: int
    evictions: list[tuple[int, list[int]]] = field(default_factory=list)


@dataclass(slots=True)
class Verdict:
    """`gap` [n]: by how much the best logit beat that of each sampled token; 0 when it was best."""

    gaps: np.ndarray[Any, np.dtype[np.float64]]

    def num_worse_than(self, tolerance: float) -> int:
        return int(np.count_nonzero(self.gaps > tolerance))


class Oracle:
    """The model at `path`, float32 on the CPU, eager attention."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager", dtype="float32"
        ).eval()

    def judge(self, prompt: list[int], output: list[int], stretches: list[Stretch]) -> Verdict:
        """Compare the greedy tokens `output` with the model's logits, stretch by stretch."""
        tokens = prompt + output
        gaps = []
        for number, stretch in enumerate(stretches):
            last = number + 1 == len(stretches)
            end = len(tokens) if last else min(stretches[number + 1].known, len(tokens))
            if end > stretch.known:
                gaps.append(self._gaps(tokens[:end], stretch))
        return Verdict(np.concatenate(gaps) if gaps else np.empty(0))

    def _gaps(self, tokens: list[int], stretch: Stretch) -> Any:
        import torch

        n = len(tokens) - 1  # the last token is judged, never a query
        visible = torch.ones(n, n, dtype=torch.bool).tril()
        for num_tokens, ids in stretch.evictions:
            if num_tokens < n:
                visible[num_tokens:, [i for i in ids if i < n]] = False
        mask = torch.zeros(n, n).masked_fill(~visible, torch.finfo(torch.float32).min)
        first = stretch.known - 1
        with torch.no_grad():
            logits = self._model(
                input_ids=torch.tensor([tokens[:n]]),
                position_ids=torch.arange(n)[None],
                attention_mask=mask[None, None],
                use_cache=False,
                logits_to_keep=n - first,
            ).logits[0]
        chosen = logits.gather(1, torch.tensor(tokens[first + 1 :])[:, None])[:, 0]
        return (logits.max(dim=1).values - chosen).double().numpy()
