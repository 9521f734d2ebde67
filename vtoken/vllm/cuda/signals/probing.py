"""One step's score probes on the device.

The attention layers of probed layers call it after their kernel, outside CUDA graphs. A step with
probes is not treated as a uniform decode (`DeviceExecutor.leaves_full_graphs`), so it runs
piecewise in vLLM's runner, with attention as Python between two graphs. All other
steps keep their full graphs; `probe.every_steps` sets how many steps probe.

- prompt chunks: `vtoken.vllm.worker.probe`, request by request, in plain torch
- single queries: one row a request, and three Triton launches a layer for all requests with the
  same aggregation over layers and heads; without Triton, request by request in plain torch

Keys are read through the rows of the batch in `pages`, in logical order, so a row depends on which
tokens are live and not on their slots. Both ways only launch; the host never waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vtoken.vllm.cuda.copies.transfer import upload
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.worker.probe import ProbedRequest, divisor_of, probe


class DeviceProbe:
    """One step's probes; `resident`: request -> its row of the batch, and so of `pages`."""

    def __init__(
        self,
        probed: Sequence[ProbedRequest],
        pages: PageTables,
        resident: Mapping[str, int],
        *,
        use_triton: bool,
    ) -> None:
        groups: dict[Any, list[ProbedRequest]] = {}
        for request in probed:
            if use_triton and request.num_new == 1:
                groups.setdefault(request.row_key[1:], []).append(request)
        self._single = [_SingleQueries(group, pages, resident) for group in groups.values()]
        self._in_torch = [p for p in probed if not (use_triton and p.num_new == 1)]
        for request in self._in_torch:
            request.slots = pages.slots(resident[request.request_id], len(request.ids))

    def add_layer(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        *,
        scale: float,
        soft_cap: float,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Add the attention of `layer`'s `query` [T, Hq, D] over `key` [N, S, Hkv, D] to the rows.

        `sinks` [Hq]: the layer's attention sinks. Does nothing if no request is probed on it.
        """
        if self._in_torch:
            probe(self._in_torch, layer, query, key, scale=scale, soft_cap=soft_cap, sinks=sinks)
        for group in self._single:
            if layer in group.signal.layers:
                group.add_layer(layer, query, key, scale, soft_cap, sinks)


class _SingleQueries:
    """Requests with a single query and the same aggregation over layers and heads.

    Signals of one request share its row. `signal`: that of one of them.
    """

    def __init__(
        self, requests: Sequence[ProbedRequest], pages: PageTables, resident: Mapping[str, int]
    ) -> None:
        self._requests = requests
        self.signal, self._heads = requests[0].signal, requests[0].heads
        by_request = {p.request_id: p for p in requests}
        self._row_of = {request_id: row for row, request_id in enumerate(by_request)}
        lengths = [len(p.ids) for p in by_request.values()]
        self._table = pages.pages
        self._width = max(lengths)
        places = [[p.first, resident[request_id]] for request_id, p in by_request.items()]
        columns = np.column_stack([places, lengths]).T.astype(np.int32)
        self._queries, self._resident, self._lengths = upload(columns, self._table.device)
        self._rows: torch.Tensor | None = None
        self._chosen: torch.Tensor | None = None  # heads on this rank

    def add_layer(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        scale: float,
        soft_cap: float,
        sinks: torch.Tensor | None,
    ) -> None:
        from vtoken.vllm.cuda.kernels import probe_scores

        signal, num_heads = self.signal, query.shape[1]
        if self._rows is None or self._chosen is None:
            shape = signal.parts, len(self._row_of), self._width
            self._rows = torch.zeros(shape, dtype=torch.float32, device=query.device)
            for p in self._requests:
                row = self._row_of[p.request_id]
                p.rows = self._rows[:, row : row + 1, : len(p.ids)]
            own = self._heads.own(signal, num_heads)
            chosen = np.arange(num_heads) if own is None else np.array(own)
            self._chosen = upload(chosen.astype(np.int32), query.device)
        if not len(self._chosen):
            return
        if sinks is None:
            sinks = torch.full((num_heads,), float("-inf"), device=query.device)
        probe_scores(
            query,
            key.flatten(0, 1),
            self._table,
            self._lengths,
            self._rows[signal.layers.index(layer) if signal.parts > 1 else 0],
            heads=self._chosen,
            sinks=sinks.detach().float(),
            divisor=divisor_of(signal, self._heads, num_heads),
            use_max=signal.over_heads == "max",
            scale=scale,
            soft_cap=soft_cap,
            queries=self._queries,
            rows=self._resident,
        )
