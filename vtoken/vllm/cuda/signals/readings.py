"""The scores of a step that kernels read: of all requests with the same signal at once.

`put` before the forward decides what is read and where it goes in the outbox; `run` after it
launches the kernels. Whatever has no kernel is left to `vtoken.vllm.worker.scores`: kinds of other
packages, signals with redundancy, and accumulators that a chunk is added to in this step.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch

from vtoken.base.arrays import Ints
from vtoken.core.protocol.mirror import Mirrors
from vtoken.policies.signals import AnchoredKeyKind, Signal
from vtoken.vllm.cuda.copies.staging import Staging
from vtoken.vllm.cuda.signals.accumulators import DeviceAccumulator
from vtoken.vllm.cuda.signals.constants import Constants
from vtoken.vllm.cuda.signals.layers import AttentionLayer
from vtoken.vllm.cuda.signals.probing import KINDS
from vtoken.vllm.cuda.signals.tables import Addresses, KeyReadings, Readings, Table
from vtoken.vllm.worker.heads import RankHeads
from vtoken.vllm.worker.probe import folded
from vtoken.vllm.worker.ranks import Ranks
from vtoken.vllm.worker.stages import Owners, SignalKey

KEY_KINDS = {"key_norm", "key_difference"}


class SignalReadings:
    """The readings of one step.

    `owners`: the tokens that the numbers belong to, in the order of `outbox` [numbers], which later
    steps do not write; None before `run`, and where nothing is read. `anchors`: by
    signal, see `KeyReadings`, with `num_anchors` rows, those of the mirrors; they stay from step to
    step.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        constants: Constants,
        anchors: dict[Signal, torch.Tensor],
        num_anchors: int,
    ) -> None:
        self.owners: Owners = {}
        self.outbox: torch.Tensor | None = None
        self._layers, self._constants = layers, constants
        self._anchors, self._num_anchors = anchors, num_anchors
        self._num_numbers = 0
        self._read: list[Readings | KeyReadings] = []

    def put(
        self,
        wanted: Sequence[SignalKey],
        mirrors: Mirrors,
        rows: Mapping[str, int],
        in_torch: Container[str],
        staging: Staging,
        heads: RankHeads,
    ) -> None:
        """Stage the readings of those of `wanted` that have a kernel.

        `rows`: request -> its row of the batch. `in_torch`: requests whose accumulators torch adds
        to in this step.
        """
        by_signal: dict[Signal, list[str]] = {}
        for name, signal in wanted:
            has_kernel = signal.kind in KEY_KINDS
            if signal.kind in KINDS:
                has_kernel = not signal.is_mixed and name not in in_torch
            if has_kernel and name in rows and name in mirrors:
                by_signal.setdefault(signal, []).append(name)
        for signal, names in by_signal.items():
            if signal.of_keys:
                self._put_keys(signal, names, mirrors, rows, staging, heads)
            else:
                self._put_attention(signal, names, mirrors, staging)

    def _put_keys(
        self,
        signal: Signal,
        names: list[str],
        mirrors: Mirrors,
        rows: Mapping[str, int],
        staging: Staging,
        heads: RankHeads,
    ) -> None:
        of_mirrors = mirrors.rows_of(names)
        ids, _ = mirrors.live(of_mirrors)
        entries = []
        for i, (name, row) in enumerate(zip(names, of_mirrors.tolist(), strict=True)):
            live, mirror, first, exists = ids.of(i), mirrors[name], 0, False
            num_tokens = mirror.num_tokens
            if signal.anchor == "seen":
                seen = mirror.seen[signal]
                exists = seen.num_tokens > 0
                first = len(live) - seen.advance(live, num_tokens)
            start = self._own(name, signal, live, num_tokens)
            entries.append((len(live), start, rows[name], first, row, exists))
        layers = [self._layers[number] for number in signal.layers]
        self._read.append(
            KeyReadings(
                signal,
                Table.of(entries, staging),
                [layer.key.flatten(0, 1) for layer in layers],
                [self._constants.weights(signal, heads, layer) for layer in layers],
                self._anchors_of(signal, layers[0].key),
            )
        )

    def _anchors_of(self, signal: Signal, key: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(signal.definition, AnchoredKeyKind):
            return None
        if signal not in self._anchors:
            shape = (self._num_anchors, len(signal.layers), *key.shape[2:])
            self._anchors[signal] = torch.zeros(shape, dtype=torch.float32, device=key.device)
        return self._anchors[signal]

    def _put_attention(
        self, signal: Signal, names: list[str], mirrors: Mirrors, staging: Staging
    ) -> None:
        entries, read, addresses = [], [], []
        for name in names:
            accumulator = mirrors[name].accumulators.get(signal)
            if not isinstance(accumulator, DeviceAccumulator) or not accumulator.is_warm:
                continue
            ids = accumulator.ids
            start = self._own(name, signal, ids, accumulator.num_tokens)
            num_rows = min(accumulator.num_queries, accumulator.num_rows)
            entries.append((len(ids), start, num_rows, accumulator.num_columns))
            addresses.append(accumulator.address)
            read.append(accumulator.data)
        if read:
            table, bases = Table.of(entries, staging), Addresses((addresses,), staging)
            self._read.append(Readings(signal, table, bases, read))

    def _own(self, name: str, signal: Signal, ids: Ints, num_tokens: int) -> int:
        """Reserve numbers for the tokens `ids`; where they begin in the outbox."""
        start = self._num_numbers
        self.owners[name, signal] = ids, num_tokens
        self._num_numbers += len(ids)
        return start

    def run(self, pages: torch.Tensor, ranks: Ranks) -> None:
        """Launch the readings into a new `outbox`."""
        if not self._read:
            return
        from vtoken.vllm.cuda.signals import kernels

        found: dict[int, torch.Tensor] = {}
        read = self._read
        for number, of in enumerate(read):
            if isinstance(of, KeyReadings):
                found[number] = kernels.read_keys(of, pages)
            else:
                found[number] = kernels.read_accumulators(of)[None]
        # Accumulators of signals that are not linear have the rows of all ranks.
        sums = {n: v for n, v in found.items() if read[n].signal.is_linear}
        of_keys = {n: v for n, v in found.items() if read[n].signal.of_keys}
        maxima = {n: v for n, v in of_keys.items() if read[n].signal.over_heads == "max"}
        sums |= {n: v for n, v in of_keys.items() if n not in maxima}
        found |= ranks.sum(sums) | ranks.max(maxima)
        outbox = torch.empty(self._num_numbers, dtype=torch.float32, device=pages.device)
        for number, of in enumerate(read):
            kernels.pool(of.signal, folded(of.signal, found[number]), of.entries, outbox)
        self.outbox = outbox
