"""The score probe: how much attention each live token receives from this step's queries.

Runs after the stock kernel, which it does not touch, on the probed layers only. For every request
the keys of its live tokens are gathered by id, so the result depends on what is live, not on where
it lies. A token's score is the sum over queries of the mean over heads of softmax(q k / sqrt(d)).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vtoken.mirror import Mirror

MAX_QUERIES = 256  # rows of attention held at once


@dataclass(frozen=True, slots=True)
class ProbedRequest:
    """Queries `first` .. `first + num_new` of the batch belong to the request of `mirror`."""

    first: int
    num_new: int
    mirror: Mirror


def probe(
    requests: list[ProbedRequest],
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    scale: float,
    soft_cap: float,
) -> None:
    """Accumulate the attention of `query` [T, Hq, D] over `key` [N, S, Hkv, D] into the mirrors."""
    block_size, num_kv_heads = key.shape[1], key.shape[2]
    for request in requests:
        ids, slots = request.mirror.live()
        index = torch.from_numpy(slots)
        k = key[index // block_size, index % block_size].float()  # [n, Hkv, D]
        groups = query.shape[1] // num_kv_heads
        k = k.repeat_interleave(groups, dim=1).permute(1, 2, 0)  # [Hq, D, n]
        token_ids = torch.from_numpy(ids)
        first_id = request.mirror.num_tokens - request.num_new
        total = torch.zeros(len(ids))
        for start in range(0, request.num_new, MAX_QUERIES):
            stop = min(start + MAX_QUERIES, request.num_new)
            q = query[request.first + start : request.first + stop].float().transpose(0, 1)
            logits = torch.matmul(q, k) * scale  # [Hq, queries, n]
            if soft_cap:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            positions = torch.arange(first_id + start, first_id + stop)
            logits.masked_fill_(token_ids[None, :] > positions[:, None], float("-inf"))
            total += torch.softmax(logits, dim=-1).mean(dim=0).sum(dim=0)
        request.mirror.accumulate(ids, total.numpy())
