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

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vtoken.base.arrays import Ints
from vtoken.core.protocol.mirror import Mirror, Mirrors
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
        num_rows, signal, own = len(tables.pages), None, self._chunks
        for request in probed:
            if request.num_new != 1 or request.first >= num_rows:
                self._chunks.append(request)
                continue
            if request.signal is not signal:  # hashing it takes longer than the rest
                signal = request.signal
                own = by_signal.setdefault(signal, [])
            own.append(request)
        groups: dict[Any, dict[Signal, list[ProbedRequest]]] = {}  # by `ProbedRequest.row_key`
        for signal, own in by_signal.items():
            groups.setdefault(own[0].row_key[1:], {})[signal] = own
        self._singles = [
            _SingleQueries(key, of_group, rows, staging, constants, ranks)
            for key, of_group in groups.items()
        ]
        self.in_torch = self._chunks + [p for group in self._singles for p in group.in_torch]
        ProbedRequest.read(self.in_torch)
        for request in self._chunks:
            request.slots = tables.slots(rows[request.request_id], len(request.ids))
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


class _Requests(NamedTuple):
    """The requests of some single queries, as columns. `rows` [R]: those of their mirrors."""

    mirrors: Mirrors
    rows: Ints
    num_live: list[int]
    num_tokens: list[int]
    versions: list[int]
    row_of: dict[str, int]  # by name

    @classmethod
    def of(cls, mirrors: Sequence[Mirror], names: Iterable[str]) -> _Requests:
        table = mirrors[0].mirrors
        rows = np.array([mirror.row for mirror in mirrors], dtype=np.int64)
        columns, row_of = table.columns, dict(zip(names, range(len(rows)), strict=True))
        facts = columns.num_live, columns.num_tokens, columns.version
        live, tokens, versions = (fact[rows].tolist() for fact in facts)
        return cls(table, rows, live, tokens, versions, row_of)

    def live(self, which: list[int]) -> dict[int, Ints]:
        """The ids of the live tokens of the requests `which`."""
        if not which:
            return {}
        ids, _ = self.mirrors.live(self.rows[which])
        return {row: ids.of(i) for i, row in enumerate(which)}


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
        requests = _Requests.of([p.mirror for p in by_request.values()], by_request)
        self._row_of = requests.row_of
        self._first = Table([p.first for p in by_request.values()], staging)
        self._rows = Table([rows[name] for name in by_request], staging)
        self._lengths = Table(requests.num_live, staging)
        self.in_torch: list[ProbedRequest] = []
        self._added: list[Additions] = []
        for signal, own in by_signal.items():
            if signal.kind not in KINDS:
                self.in_torch += own
            elif signal.is_linear or ranks.agreed:  # ranks that differ exchange nothing
                self._added.append(_additions(signal, own, requests, staging))

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
    signal: Signal, probed: Sequence[ProbedRequest], requests: _Requests, staging: Staging
) -> Additions:
    """Account for the single queries `probed` in their accumulators of `signal`."""
    accumulators: list[DeviceAccumulator] = []
    rows, num_live, num_tokens = [], requests.num_live, requests.num_tokens
    versions = requests.versions
    changed: list[int] = []  # rows of requests whose live tokens may be others than before
    for request in probed:
        accumulator = request.mirror.accumulators[signal]
        assert isinstance(accumulator, DeviceAccumulator)
        row = requests.row_of[request.request_id]
        if accumulator.may_differ(versions[row]):
            changed.append(row)
        accumulators.append(accumulator)
        rows.append(row)
    live = requests.live(changed)
    entries: list[tuple[int, ...]] = []
    addresses: tuple[list[int], list[int], list[int]] = ([], [], [])
    tensors: tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]] = ([], [], [])
    kept: list[Ints] = []
    num_kept = width = 0
    sums = signal.definition.queries == "all"
    for row, accumulator in zip(rows, accumulators, strict=True):
        size, address, length = accumulator.num_columns, accumulator.address, num_live[row]
        before, known, change, query = accumulator.advance(
            length, num_tokens[row], versions[row], live.get(row)
        )
        now, start, num_dead = accumulator.data, -1, 0
        if change is not None:
            columns = change.columns
            if sums:
                columns[change.back] = -1 - change.back_ids
                num_dead = len(change.dead)
                columns = np.concatenate((columns, change.dead, change.dead_ids))
            start, num_kept = num_kept, num_kept + len(columns)
            kept.append(columns)
        entries.append((length, row, known, start, query, size, accumulator.num_columns, num_dead))
        addresses[0].append(address)
        addresses[1].append(accumulator.address)
        addresses[2].append(accumulator.of_dead.data_ptr())
        tensors[0].append(before)
        tensors[1].append(now)
        tensors[2].append(accumulator.of_dead)
        written = length if now is before else accumulator.num_columns
        width = max(width, written, num_dead)
    return Additions(
        signal,
        Table.of(entries, staging),
        Addresses(addresses, staging),
        Table(np.concatenate(kept), staging) if num_kept else None,
        accumulators[0].num_rows,
        width,
        *tensors,
    )
