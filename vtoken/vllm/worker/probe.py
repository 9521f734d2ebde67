"""The probe: attention rows of this step's queries, and key signals, on the probed layers.

Plain torch on any device, where nothing here makes the host wait for the device.

Runs after the stock kernel, which it does not touch. For every request the keys of its live tokens
are gathered by id, so the result depends on what is live, not on where it lies. What a row is, and
what becomes of it, stands in `vtoken.policies.signals`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vtoken.arrays import Ints, Ragged
from vtoken.policies.signals import Signal
from vtoken.protocol.mirror import Mirror

MAX_QUERIES = 256  # rows of attention held at once, and
MAX_LOGITS = 1 << 26  # logits of all heads, 4 bytes each
MAX_KEYS = 4096  # tokens whose keys are held at once, as float32


@dataclass(slots=True)
class ProbedRequest:
    """Queries `first` .. `first + num_new` of the batch belong to the request of `mirror`.

    `ids` [n], `slots` [n]: its live tokens, those that ask included. `rows`: what the layers so far
    gave, as `Keeper.add` takes it; None before the first one. Both tensors are where the cache is.
    """

    request_id: str
    first: int
    num_new: int
    mirror: Mirror
    signal: Signal
    ids: Ints
    slots: torch.Tensor
    rows: torch.Tensor | None = None

    @classmethod
    def of(cls, request_id: str, first: int, num_new: int, mirror: Mirror) -> list[ProbedRequest]:
        """One for each signal that `mirror` keeps, next to each other."""
        rows = np.array([mirror.row], dtype=np.int64)
        return cls.of_many([(request_id, first, num_new, mirror)], mirror.mirrors.live(rows))

    @classmethod
    def of_many(
        cls, requests: Sequence[tuple[str, int, int, Mirror]], live: tuple[Ragged, Ragged]
    ) -> list[ProbedRequest]:
        """`of` for several requests; `live`: the ids and slots of their live tokens."""
        ids, slots = live
        places = torch.from_numpy(slots.values).split(slots.counts.tolist())
        return [
            cls(request_id, first, num_new, mirror, signal, ids.of(i), places[i])
            for i, (request_id, first, num_new, mirror) in enumerate(requests)
            for signal in mirror.keepers
        ]


def probe(
    requests: list[ProbedRequest],
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    scale: float,
    soft_cap: float,
) -> None:
    """Add one layer's attention of `query` [T, Hq, D] over `key` [N, S, Hkv, D] to the rows.

    Signals of one request stand next to each other: keys are gathered once for all of them, and the
    row of a single query, which is the same for every signal, is computed once. Longer prompts are
    computed for each signal as for it alone, so that none depends on the others by a rounding.
    """
    of: ProbedRequest | None = None
    for request in requests:
        if of is None or of.request_id != request.request_id:
            of = request
            k = gather_keys(key, request.slots).permute(1, 2, 0)  # [Hkv, D, n]
            layer = _layer_rows(request, query, k, scale, soft_cap)
        elif request.num_new > 1:
            layer = _layer_rows(request, query, k, scale, soft_cap)
        request.rows = layer if request.rows is None else request.rows + layer


def _layer_rows(
    request: ProbedRequest, query: torch.Tensor, key: torch.Tensor, scale: float, soft_cap: float
) -> torch.Tensor:
    """What one layer adds to the rows of `request`; `key` [Hkv, D, n]."""
    stop = request.first + request.num_new
    num_rows = request.signal.num_rows(request.num_new)
    summed = request.signal.kind == "attention_sum"
    at_once = max(1, min(MAX_QUERIES, MAX_LOGITS // (query.shape[1] * key.shape[-1])))
    parts = []
    for start in range(stop - num_rows, stop, at_once):
        end = min(start + at_once, stop)
        rows = _rows(query[start:end].float(), key, stop - end, scale, soft_cap)
        parts.append(rows.sum(dim=0, keepdim=True) if summed else rows)
    return torch.stack(parts).sum(dim=0) if summed else torch.cat(parts)


def gather_keys(key: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The keys [n, Hkv, D] float32 of `key` [N, S, Hkv, D] at `slots` [n]."""
    block_size = key.shape[1]
    return key[slots // block_size, slots % block_size].float()


def _rows(
    query: torch.Tensor, key: torch.Tensor, num_later: int, scale: float, soft_cap: float
) -> torch.Tensor:
    """Attention [q, n], mean over heads, of `query` [q, Hq, D] over `key` [Hkv, D, n].

    The newest tokens are the ones that ask, `num_later` of them after the last query given here.
    """
    num_queries, num_heads, head_size = query.shape
    num_kv_heads, _, num_ids = key.shape
    grouped = query.transpose(0, 1).reshape(num_kv_heads, -1, head_size)  # [Hkv, G * q, D]
    logits = torch.matmul(grouped, key) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.view(num_heads, num_queries, num_ids)
    newest = num_ids - num_later - num_queries  # column of the first query's own token
    hidden = torch.ones(num_queries, num_ids, dtype=torch.bool, device=query.device)
    hidden = hidden.triu(newest + 1)
    logits.masked_fill_(hidden, float("-inf"))
    return torch.softmax(logits, dim=-1).mean(dim=0)


def key_values(signal: Signal, slots: torch.Tensor, layers: Sequence[torch.Tensor]) -> torch.Tensor:
    """The key signal [n] of the tokens in `slots` [n]; `layers` of [N, S, Hkv, D] are summed."""
    some = slots.split(MAX_KEYS)
    parts = []
    for layer in layers:
        if signal.kind == "key_norm":
            values = [gather_keys(layer, at).norm(dim=-1).mean(dim=1) for at in some]
        else:
            anchor = torch.stack([_unit(gather_keys(layer, at)).sum(dim=0) for at in some])
            mean = anchor.sum(dim=0) / len(slots)  # [Hkv, D]
            values = [_cosine(gather_keys(layer, at), mean) for at in some]
        parts.append(torch.cat(values))
    return -torch.stack(parts).sum(dim=0)


def _unit(key: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(key, dim=-1)


def _cosine(key: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Mean over heads [n] of cos(`key` [n, Hkv, D], `anchor` [Hkv, D])."""
    return torch.nn.functional.cosine_similarity(key, anchor[None], dim=-1).mean(dim=1)
