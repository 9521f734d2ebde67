"""The kernels of `vtoken.vllm.cuda.signals` in plain torch, request by request.

For devices that run no Triton: a CPU without the interpreter, torch's `meta`, a `LateDevice`. Only
the host's copies of the tables are looked at. `tests/support/shuffled.py` compares Triton's own
kernels with these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from vtoken.policies.signals import AnchoredKeyKind, Signal
from vtoken.vllm.cuda.signals import kernels, probe_kernels
from vtoken.vllm.cuda.signals.tables import Additions, KeyReadings, Readings, Table
from vtoken.vllm.worker.probe import folded, pooled


@contextmanager
def signals_in_torch() -> Iterator[None]:
    """Within, signals are computed by the functions of this module."""
    own = (accumulate, read_accumulators, read_keys, pool)
    with (
        patch.multiple(kernels, **{function.__name__: function for function in own}),
        patch.object(probe_kernels, "probe_scores", probe_scores),
    ):
        yield


def probe_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    scores: torch.Tensor,
    *,
    scale: float,
    queries: torch.Tensor,
    rows: torch.Tensor,
    heads: torch.Tensor,
    sinks: torch.Tensor,
    divisor: float,
    use_max: bool = False,
    soft_cap: float = 0.0,
) -> None:
    num, width = scores.shape
    live = torch.arange(width, device=scores.device) < seq_lens[:, None]
    slots = torch.where(live, table.index_select(0, rows)[:, :width], 0).long()
    group = query.shape[1] // key.shape[1]
    k = key.index_select(0, slots.flatten()).view(num, width, *key.shape[1:]).float()
    k = k.repeat_interleave(group, dim=2)
    q = query.index_select(0, queries).float()
    logits = torch.einsum("rhd,rnhd->rhn", q, k) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.masked_fill(~live[:, None], float("-inf"))
    column = sinks[None, :, None].expand(num, -1, 1)
    weights = torch.softmax(torch.cat([logits, column], dim=-1), dim=-1)[..., :-1]
    weights = weights.index_select(1, heads)
    if use_max:
        scores.copy_(torch.maximum(scores, weights.amax(dim=1)))
    else:
        scores.add_(weights.sum(dim=1) / divisor)


def accumulate(rows: torch.Tensor, added: Additions) -> None:
    kind: Any = added.signal.definition
    for i, entry in enumerate(added.entries.host.T.tolist()):
        length, row, known, columns, query, _, _, num_dead = entry
        before, now, of_dead = added.before[i], added.now[i], added.of_dead[i]
        if before is not now:
            kept = before[:, :known]
            if columns >= 0:
                assert added.kept is not None
                at = added.kept.on_device[columns : columns + known + 2 * num_dead].long()
                at, died = at[:known], at[known:]
                kept = before.index_select(1, at.clamp(min=0))
                if kind.queries == "all":
                    of_dead.index_copy_(1, died[num_dead:], before.index_select(1, died[:num_dead]))
                    sums = torch.nn.functional.pad(of_dead, (1, 0))
                    back = (-at).clamp(min=0)
                    kept = torch.where(at < 0, sums.index_select(1, back), kept)
            now.zero_()
            now[:, :known] = kept
        given = kind.of_query(folded(added.signal, rows[:, row, :length][:, None]))
        if kind.queries == "all":
            now[0, :length] += kind.over_queries(given)
        else:
            now[query, :length] = given[0]


def read_accumulators(readings: Readings) -> torch.Tensor:
    kind: Any = readings.signal.definition
    values = readings.values()
    for i, (length, _, num_rows, _) in enumerate(readings.entries.host.T.tolist()):
        values[i, :length] = kind.over_queries(readings.accumulators[i][:num_rows, :length])
    return values


def read_keys(readings: KeyReadings, pages: torch.Tensor) -> torch.Tensor:
    signal, kind = readings.signal, readings.signal.definition
    values = readings.values()
    values.fill_(float("-inf") if signal.over_heads == "max" else 0.0)
    for i, entry in enumerate(readings.entries.host.T.tolist()):
        length, _, row, first, anchor_row, exists = entry
        slots = pages[row, :length].long()
        for number, (layer, weights) in enumerate(
            zip(readings.keys, readings.weights, strict=True)
        ):
            keys = layer.index_select(0, slots).float().transpose(0, 1)
            if isinstance(kind, AnchoredKeyKind):
                assert readings.anchors is not None
                anchor = readings.anchors[anchor_row, number]
                if not exists:
                    anchor.zero_()
                anchor += kind.summands(keys[:, first:]).sum(dim=1)
                found = kind.against(keys, anchor)
            else:
                found = kind.numbers(keys)
            part = values[number if signal.parts > 1 else 0, i, :length]
            if signal.over_heads == "max":
                read = (weights > 0)[:, None].expand_as(found)
                found = torch.where(read, found, float("-inf")).amax(dim=0)
                part.copy_(torch.maximum(part, found))
            else:
                part += (found * weights[:, None]).sum(dim=0)
    return values


def pool(signal: Signal, values: torch.Tensor, table: Table, outbox: torch.Tensor) -> None:
    for i, (length, start, *_) in enumerate(table.host.T.tolist()):
        outbox[start : start + length] = pooled(signal, values[i, :length])
