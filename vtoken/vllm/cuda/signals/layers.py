"""What signals need of one attention layer: its keys, its form, and the queries of the step.

Probes run after the forward, because a full CUDA graph runs no Python. Inside it attention only
saves the queries of the layers that are `held` when it is captured. The other layers are saved in
steps outside of full graphs, once they have been probed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vtoken.policies.signals import AttentionKind
from vtoken.policies.signals.kind import kinds
from vtoken.vllm.cuda.layout import keys_of

MAX_IN_GRAPHS = 4  # layers whose queries full graphs save


@dataclass(slots=True, eq=False)
class AttentionLayer:
    """One layer: `key` [N, S, Hkv, D], read by `num_heads` query heads of this rank.

    `sinks` [num_heads]: its attention sinks. `queries` [rows, num_heads, D]: those of the first
    tokens of the newest forward; None while none are saved. A batch begins with the requests that
    have a single query. `in_graphs`: full graphs save them too.
    """

    key: torch.Tensor
    num_heads: int
    scale: float
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    in_graphs: bool = False

    @classmethod
    def of(cls, impl: Any, cache: torch.Tensor) -> AttentionLayer:
        """The layer of vLLM's attention implementation `impl` and its `cache` [N, H, S, 2D]."""
        soft_cap = float(impl.logits_soft_cap or 0.0)
        return cls(keys_of(cache), impl.num_heads, impl.scale, soft_cap, impl.sinks)

    def hold(self, num_rows: int, dtype: torch.dtype, *, in_graphs: bool = False) -> None:
        """Save the first `num_rows` queries from now on; `in_graphs`: none is captured yet."""
        self.in_graphs = in_graphs
        shape = (num_rows, self.num_heads, self.key.shape[-1])
        self.queries = torch.zeros(shape, dtype=dtype, device=self.key.device)

    def save(self, query: torch.Tensor) -> None:
        """Save `query` [T, num_heads, D] of this forward, if queries are saved."""
        if self.queries is not None:
            num_rows = min(len(query), len(self.queries))
            self.queries[:num_rows].copy_(query[:num_rows])

    @property
    def sink_logits(self) -> torch.Tensor:
        """The sinks [num_heads] float32, -inf where there are none."""
        if self.sinks is not None:
            return self.sinks.detach().float()
        return torch.full((self.num_heads,), float("-inf"), device=self.key.device)


def layers_in_graphs(num_layers: int, config: Mapping[str, Any]) -> list[int]:
    """The layers whose queries full graphs save, of `num_layers`: those of attention signals under
    the initial `config`, a patch; at most `MAX_IN_GRAPHS`.
    """
    chosen = [*config.get("probe", {}).get("layers", ())]
    of_attention = [kind for kind in kinds().values() if isinstance(kind, AttentionKind)]
    chosen += [kind.default_layer(num_layers) for kind in of_attention]
    return [number for number in dict.fromkeys(chosen) if 0 <= number < num_layers][:MAX_IN_GRAPHS]
