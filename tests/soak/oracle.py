"""The soak's reference: a model whose attention sees exactly the live tokens.

It runs the model in Hugging Face transformers on the sampled tokens and the recorded live sets,
without blocks, caches or vLLM. One masked, teacher-forced forward pass covers the entire sequence:
query q sees token k iff k <= q and k was live when q was computed. Every sampled token
is compared on its own, so a difference in the last digit of a logit never cascades.

A preempted request has one `Stretch` per admission: the tokens that existed at its (re)admission
were computed in full context.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.reference import Stretch, hide, visible


@dataclass(slots=True)
class Verdict:
    """`gaps` [n]: the best logit minus that of each sampled token; 0 if it was the best."""

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

    def compare(self, prompt: list[int], output: list[int], stretches: list[Stretch]) -> Verdict:
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

        n = len(tokens) - 1  # the last token is compared, but is no query
        first = stretch.known - 1
        with torch.no_grad():
            logits = self._model(
                input_ids=torch.tensor([tokens[:n]]),
                position_ids=torch.arange(n)[None],
                attention_mask=hide(visible(n, stretch.changes), torch.float32),
                use_cache=False,
                logits_to_keep=n - first,
            ).logits[0]
        chosen = logits.gather(1, torch.tensor(tokens[first + 1 :])[:, None])[:, 0]
        return (logits.max(dim=1).values - chosen).double().numpy()
