"""The order of a step's relocations: after the previous forward, before the step's attention.

    main        … forward n-1 | sampling n-1 | inputs n | wait ─► forward n …
                              └─ event ─┐                  ▲
    relocation                          └─► copies n ── event

Step n executes its own plan. On the device, the copies wait for the end of forward n-1 and then run
beside sampling n-1 and the preparation of step n, which do not touch the KV cache. The main stream
waits for the copies right before step n first touches the cache. The host waits only if `sync` is
set (the ablation of paper 3.4, figure 8).

Why this is safe (I3), also with asynchronous scheduling, where step n is planned while n-1 runs:

1. Copies read complete data. They wait for the end of forward n-1, so all writes of forward n-1 and
   earlier are done. Earlier relocations are done too: forward n-1 waited for their event.
2. No unfinished forward reads a destination. Forwards in flight are n-1 or earlier and end before
   the copies start.
3. No source is overwritten before it is read. Other requests may get the blocks that step n's plan
   frees in the same step. Their first write is part of forward n, or of vLLM's own clearing and
   copying of blocks before it; both come after the main stream's wait.
4. Attention n reads relocated tokens after the same wait, and later forwards follow it in order.
5. Within a step every source is read before a destination overwrites it, see `copy_engine`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vtoken.base.arrays import Ints
from vtoken.vllm.cuda.copies.streams import Stream, Streams

Copy = Callable[[Ints, Ints], None]


class StagedCopies:
    """One worker's relocations in stage order: `begin` … `guard` … `forward_ended`, every step."""

    def __init__(self, streams: Streams, copy: Copy, *, sync: bool = False) -> None:
        self._streams = streams
        self._copy = copy
        self._sync = sync
        self._forward_end: Any = None
        self._pending: Any = None
        self._is_pending = False

    def begin(
        self, source: Ints, destination: Ints, zero: Callable[[], None] | None = None
    ) -> None:
        """Launch `zero`, then the copies `source` [k] -> `destination` [k], after the last forward.

        `zero` clears blocks that another group of layers may have used until then.
        """
        if self._forward_end is None:  # no forward yet: wait for everything launched so far
            self._forward_end = self._streams.record(Stream.MAIN)
        self._streams.wait(Stream.RELOCATION, self._forward_end)
        if zero is not None:
            self._streams.launch(Stream.RELOCATION, zero)
        self._streams.launch(Stream.RELOCATION, lambda: self._copy(source, destination))
        self._pending = self._streams.record(Stream.RELOCATION)
        self._is_pending = True
        if self._sync:
            self.finish()

    def guard(self) -> None:
        """Make everything launched on the main stream from now on wait for the copies."""
        if self._is_pending:
            self._streams.wait(Stream.MAIN, self._pending)
            self._is_pending = False

    def finish(self) -> None:
        """Make the host wait until the copies are done; only for the ablation."""
        if self._is_pending:
            self._streams.synchronize(self._pending)

    def forward_ended(self) -> None:
        """Call when the step's forward, and all that reads the cache after it, is launched."""
        self._forward_end = self._streams.record(Stream.MAIN)
