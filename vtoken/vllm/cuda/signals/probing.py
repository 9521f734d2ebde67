"""One step's score probes on the device: which queries are seen, and by which code.

Called by the attention layers of the probed layers, after their kernel, outside CUDA graphs: a step
that probes is declared no uniform decode (`DeviceHalf.leaves_full_graphs`), so it runs piecewise,
where attention is Python between two graphs, in vLLM's runners V1 and V2 alike. The other steps
keep their full graphs; `probe.every_steps` chooses how many those are.

- prompt chunks: `vtoken.vllm.worker.probe`, request by request, in plain torch
- single queries: one row a request, of all requests that put layers and heads together alike in two
  Triton launches a layer; in plain torch, request by request, where Triton is not meant to be used

Keys are read through the resident rows of `pages`, in logical order, so a row depends on what is
live and not on where it lies. Both ways only launch; nothing makes the host wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vtoken.vllm.cuda.copies.transfer import upload
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.worker.probe import ProbedRequest, probe, share_of


class DeviceProbe:
    """`resident`: request -> its row of `pages`, which is up to date."""

    def __init__(
        self,
        probed: Sequence[ProbedRequest],
        pages: PageTables,
        resident: Mapping[str, int],
        *,
        use_triton: bool,
    ) -> None:
        alike: dict[Any, list[ProbedRequest]] = {}
        for request in probed:
            if use_triton and request.num_new == 1:
                alike.setdefault(request.row_key[1:], []).append(request)
        self._singles = [_Singles(singles, pages, resident) for singles in alike.values()]
        self._others = [p for p in probed if not (use_triton and p.num_new == 1)]
        for request in self._others:
            request.slots = pages.slots(resident[request.request_id], len(request.ids))

    def add_layer(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, *, scale: float, soft_cap: float
    ) -> None:
        """Add the attention of `layer`'s `query` [T, Hq, D] over `key` [N, S, Hkv, D] to the rows;
        nothing where no request is probed on that layer.
        """
        if self._others:
            probe(self._others, layer, query, key, scale=scale, soft_cap=soft_cap)
        for singles in self._singles:
            if layer in singles.signal.layers:
                singles.add_layer(layer, query, key, scale, soft_cap)


class _Singles:
    """The requests with one query each that put layers and heads together alike; signals of one
    request share its row. `signal`: of one of them.
    """

    def __init__(
        self, singles: Sequence[ProbedRequest], pages: PageTables, resident: Mapping[str, int]
    ) -> None:
        self._singles = singles
        self.signal, self._heads = singles[0].signal, singles[0].heads
        by_request = {p.request_id: p for p in singles}
        self._row_of = {request_id: row for row, request_id in enumerate(by_request)}
        lengths = [len(p.ids) for p in by_request.values()]
        self._table = pages.table
        self._width = max(lengths)
        places = [[p.first, resident[request_id]] for request_id, p in by_request.items()]
        told = np.column_stack([places, lengths]).T.astype(np.int32)
        self._queries, self._resident, self._lengths = upload(told, self._table.device)
        self._rows: torch.Tensor | None = None
        self._chosen: torch.Tensor | None = None  # heads of this rank

    def add_layer(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, scale: float, soft_cap: float
    ) -> None:
        from vtoken.vllm.cuda.kernels import probe_scores

        signal, num_heads = self.signal, query.shape[1]
        if self._rows is None or self._chosen is None:
            shape = signal.parts, len(self._row_of), self._width
            self._rows = torch.zeros(shape, dtype=torch.float32, device=query.device)
            for p in self._singles:
                row = self._row_of[p.request_id]
                p.rows = self._rows[:, row : row + 1, : len(p.ids)]
            own = self._heads.own(signal, num_heads)
            chosen = np.arange(num_heads) if own is None else np.array(own)
            self._chosen = upload(chosen.astype(np.int32), query.device)
        if not len(self._chosen):
            return
        probe_scores(
            query,
            key.flatten(0, 1),
            self._table,
            self._lengths,
            self._rows[signal.layers.index(layer) if signal.parts > 1 else 0],
            heads=self._chosen,
            share=share_of(signal, self._heads, num_heads),
            greatest=signal.over_heads == "max",
            scale=scale,
            soft_cap=soft_cap,
            queries=self._queries,
            rows=self._resident,
        )
