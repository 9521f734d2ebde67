"""What the kernels of signals are told about the requests of a step: one column a request.

The host makes these tables before the forward, and they travel with the step's other inputs. The
first row of each has the tokens of a request; row 1 of a reading, where its numbers begin in the
outbox.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vtoken.policies.signals import Signal
from vtoken.vllm.cuda.copies.staging import Staging

Ints32 = npt.NDArray[np.int32]
ALIGNMENT = 16  # numbers; rows of that many load whole vectors


class Table:
    """`host` [k, n] int32, and the same `on_device` once `staging` was sent."""

    __slots__ = ("_section", "host")

    def __init__(self, host: npt.ArrayLike, staging: Staging) -> None:
        self.host: Ints32 = np.ascontiguousarray(host, dtype=np.int32)
        self._section = staging.put(self.host)

    @classmethod
    def of(cls, columns: Sequence[Sequence[int]], staging: Staging) -> Table:
        """From the n columns, of k numbers each."""
        return cls(np.array(columns, dtype=np.int32).T, staging)

    @property
    def on_device(self) -> torch.Tensor:
        return self._section.on_device


class Addresses:
    """`host` [k, n] int64 addresses of tensors, which the owner of this table keeps."""

    __slots__ = ("_section", "host")

    def __init__(self, addresses: Sequence[Sequence[int]], staging: Staging) -> None:
        self.host = np.array(addresses, dtype=np.int64)
        self._section = staging.put(self.host.view(np.int32))

    @property
    def on_device(self) -> torch.Tensor:
        return self._section.on_device.view(torch.int64)


@dataclass(slots=True)
class Additions:
    """The rows of single queries that go to the accumulators of one signal.

    `entries` [8, n]: live tokens, the request's row, how many of the tokens stay or came back,
    where those begin in `kept` (-1: no token died or came back), the row that is written, columns
    of the accumulator before and now, and how many sums are kept of tokens that died. `bases`
    [3, n]: the accumulators `before` and `now`, which differ where columns changed or the
    accumulator grew; all of a new one is written; and the sums `of_dead`. `kept`: the columns
    before of the tokens that stay. In sums, -1 - id for a token that came back, whose sum is in
    `of_dead`; and then, of the tokens that died, first their columns before and then their ids.
    `num_rows`: of an accumulator. `width`: the most columns, or sums of tokens that died, that are
    written.
    """

    signal: Signal
    entries: Table
    bases: Addresses
    kept: Table | None
    num_rows: int
    width: int
    before: list[torch.Tensor]
    now: list[torch.Tensor]
    of_dead: list[torch.Tensor]


@dataclass(slots=True)
class Readings:
    """The accumulators of one signal whose numbers are reported.

    `entries` [4, n]: live tokens, place in the outbox, rows in use, columns. `bases` [1, n]: the
    accumulators.
    """

    signal: Signal
    entries: Table
    bases: Addresses
    accumulators: list[torch.Tensor]

    def values(self) -> torch.Tensor:
        """Memory for the numbers before neighbours [n, width]."""
        return _values(self.entries, (), self.accumulators[0].device)


@dataclass(slots=True)
class KeyReadings:
    """The requests whose keys are read for one signal.

    `entries` [6, n]: live tokens, place in the outbox, row of the batch, the first new token, row
    of `anchors`, whether that row has a sum already. By layer of the signal: `keys` [slots, Hkv,
    D], and `weights` [Hkv] float32, each KV head's share of a mean, 0 for one that is not read.
    `anchors` [rows, L, Hkv, D] float32: sums over the tokens seen; None: of a kind without any.
    """

    signal: Signal
    entries: Table
    keys: list[torch.Tensor]
    weights: list[torch.Tensor]
    anchors: torch.Tensor | None

    def values(self) -> torch.Tensor:
        """Memory for a rank's part before neighbours [P, n, width]."""
        return _values(self.entries, (self.signal.parts,), self.keys[0].device)


def padded(lengths: Table) -> int:
    """The columns of rows for requests of these lengths, the first row of a table of several."""
    longest = lengths.host[0] if lengths.host.ndim > 1 else lengths.host
    return -(-int(longest.max()) // ALIGNMENT) * ALIGNMENT


def _values(entries: Table, parts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    shape = (*parts, entries.host.shape[1], padded(entries))
    return torch.empty(shape, dtype=torch.float32, device=device)
