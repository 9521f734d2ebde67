"""One step's score probes on the device.

- single queries: a few Triton launches after the forward, for all requests with the same
  aggregation over layers and heads, from the queries that attention saved (`layers`). One more for
  each signal adds the rows to its accumulators
- prompt chunks: `vtoken.vllm.worker.probe`, request by request, in plain torch, which attention
  calls after its kernel. A step with a chunk runs in no full graph

Keys are read through the rows of the batch in `pages`, in logical order, so a row depends on which
tokens are live and not on their slots. Both ways only launch; the host never waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vtoken.policies.signals import Signal
from vtoken.vllm.cuda.copies.staging import Staging
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.cuda.signals.accumulators import DeviceAccumulator
from vtoken.vllm.cuda.signals.constants import Constants
from vtoken.vllm.cuda.signals.layers import AttentionLayer
from vtoken.vllm.cuda.signals.tables import Additions, Addresses, Table, padded
from vtoken.vllm.worker.probe import ProbedRequest, divisor_of, probe
from vtoken.vllm.worker.ranks import Ranks

KINDS = {"attention_sum", "attention_last", "attention_window", "attention_max", "attention_hits"}


class DeviceProbe:
    """One step's probes; `rows`: request -> its row of the batch, and so of `tables`.

    `in_torch`: those whose rows are added to accumulators in torch.
    """

    def __init__(
        self,
        probed: Sequence[ProbedRequest],
        rows: Mapping[str, int],
        layers: Sequence[AttentionLayer],
        tables: PageTables,
        staging: Staging,
        constants: Constants,
        ranks: Ranks,
    ) -> None:
        self._layers, self._tables = layers, tables
        by_signal: dict[Signal, list[ProbedRequest]] = {}
        self._chunks: list[ProbedRequest] = []
        for request in probed:
            if request.num_new == 1 and request.first < len(tables.pages):
                by_signal.setdefault(request.signal, []).append(request)
            else:
                request.slots = tables.slots(rows[request.request_id], len(request.ids))
                self._chunks.append(request)
        groups: dict[Any, dict[Signal, list[ProbedRequest]]] = {}  # by `ProbedRequest.row_key`
        for signal, own in by_signal.items():
            groups.setdefault(own[0].row_key[1:], {})[signal] = own
        self._singles = [
            _SingleQueries(key, of_group, rows, staging, constants, ranks)
            for key, of_group in groups.items()
        ]
        self.in_torch = self._chunks + [p for group in self._singles for p in group.in_torch]
        self._saved = {number for group in self._singles for number in group.signal.layers}

    def add_layer(self, number: int, query: torch.Tensor) -> None:
        """Take the `query` [T, Hq, D] of layer `number`, whose keys are in the cache."""
        layer = self._layers[number]
        if layer.queries is None and number in self._saved:
            layer.hold(len(self._tables.pages), query.dtype)
            layer.save(query)
        if self._chunks:
            form: dict[str, Any] = {"scale": layer.scale, "soft_cap": layer.soft_cap}
            probe(self._chunks, number, query, layer.key, sinks=layer.sinks, **form)

    def run(self, ranks: Ranks) -> None:
        """Add single queries to their accumulators, after the forward."""
        for group in self._singles:
            group.run(self._layers, self._tables.pages, ranks)


class _SingleQueries:
    """Requests with a single query and the same aggregation over layers and heads.

    Signals of one request share its row, and its `key`. `signal`: that of one of them. `in_torch`:
    those whose kind has no kernel; they have rows after `run`.
    """

    def __init__(
        self,
        key: Any,
        by_signal: Mapping[Signal, list[ProbedRequest]],
        rows: Mapping[str, int],
        staging: Staging,
        constants: Constants,
        ranks: Ranks,
    ) -> None:
        self.key, self.signal = key, next(iter(by_signal))
        self._heads = ranks.heads
        self._constants = constants
        by_request = {p.request_id: p for own in by_signal.values() for p in own}
        self._row_of = {request_id: row for row, request_id in enumerate(by_request)}
        self._first = Table([p.first for p in by_request.values()], staging)
        self._rows = Table([rows[name] for name in by_request], staging)
        self._lengths = Table([len(p.ids) for p in by_request.values()], staging)
        self.in_torch: list[ProbedRequest] = []
        self._added: list[Additions] = []
        for signal, own in by_signal.items():
            if signal.kind not in KINDS:
                self.in_torch += own
            elif signal.is_linear or ranks.agreed:  # ranks that differ exchange nothing
                self._added.append(_additions(signal, own, self._row_of, staging))

    def run(self, layers: Sequence[AttentionLayer], pages: torch.Tensor, ranks: Ranks) -> None:
        found = self._attention(layers, pages)
        for request in self.in_torch:
            row = self._row_of[request.request_id]
            request.rows = found[:, row : row + 1, : len(request.ids)]
        reduce = ranks.max if self.signal.over_heads == "max" else ranks.sum
        not_linear = {added.signal: found for added in self._added if not added.signal.is_linear}
        reduced = reduce(dict.fromkeys(not_linear, found))
        from vtoken.vllm.cuda.signals import kernels

        for added in self._added:
            kernels.accumulate(reduced.get(added.signal, found), added)

    def _attention(self, layers: Sequence[AttentionLayer], pages: torch.Tensor) -> torch.Tensor:
        """The rows [P, R, width] of this rank, each up to its request's length."""
        from vtoken.vllm.cuda.signals import probe_kernels

        signal = self.signal
        shape = signal.parts, len(self._row_of), padded(self._lengths)
        found = torch.zeros(shape, dtype=torch.float32, device=pages.device)
        for part, number in enumerate(signal.layers):
            layer = layers[number]
            own = self._heads.own(signal, layer.num_heads)
            if own == []:
                continue
            assert layer.queries is not None
            probe_kernels.probe_scores(
                layer.queries,
                layer.key.flatten(0, 1),
                pages,
                self._lengths.on_device,
                found[part if signal.parts > 1 else 0],
                heads=self._constants.heads(own, layer.num_heads),
                sinks=self._constants.sinks(number, layer),
                divisor=divisor_of(signal, self._heads, layer.num_heads),
                use_max=signal.over_heads == "max",
                scale=layer.scale,
                soft_cap=layer.soft_cap,
                queries=self._first.on_device,
                rows=self._rows.on_device,
            )
        return found


def _additions(
    signal: Signal, requests: Sequence[ProbedRequest], row_of: Mapping[str, int], staging: Staging
) -> Additions:
    """Account for the single queries of `requests` in their accumulators of `signal`."""
    entries: list[tuple[int, ...]] = []
    bases: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    kept: list[Any] = []
    num_kept = num_rows = width = 0
    for request in requests:
        accumulator = request.mirror.accumulators[signal]
        assert isinstance(accumulator, DeviceAccumulator)
        before, now, known, columns, row = accumulator.advance(request.ids)
        start = -1
        if columns is not None:
            start, num_kept = num_kept, num_kept + known
            kept.append(columns)
        sizes = before.shape[1], now.shape[1]
        entries.append((len(request.ids), row_of[request.request_id], known, start, row, *sizes))
        bases[0].append(before)
        bases[1].append(now)
        num_rows = accumulator.num_rows
        width = max(width, len(request.ids) if now is before else now.shape[1])
    return Additions(
        signal,
        Table.of(entries, staging),
        Addresses(bases, staging),
        Table(np.concatenate(kept), staging) if num_kept else None,
        num_rows,
        width,
        *bases,
    )
