"""The order of a step's copies: after the previous forward, before the step's attention.

    main        … forward n-1 | sampling n-1 | inputs n | wait ─► forward n …
                              └─ event ─┐                  ▲
    relocation                          └─► copies n ── event

Step n executes its own plan. On the device, the copies wait for the end of forward n-1 and then run
beside sampling n-1 and the preparation of step n, which do not touch the KV cache. The main stream
waits for the copies right before step n first touches the cache. The host waits only if `sync` is
set (the ablation of paper 3.4, figure 8). Copies are, in this order: tokens that are parked leave
the cache, tokens are relocated, parked ones return; `host_copies` has what the first and the last
need besides.

Why this is safe (I3), also with asynchronous scheduling, where step n is planned while n-1 runs:

1. Copies read complete data. They wait for the end of forward n-1, so all writes of forward n-1 and
   earlier are done. Earlier copies are done too: forward n-1 waited for their event.
2. No unfinished forward reads a destination. Forwards in flight are n-1 or earlier and end before
   the copies start.
3. No source is overwritten before it is read. Other requests may get the blocks that step n's plan
   frees in the same step. Their first write is part of forward n, or of vLLM's own clearing and
   copying of blocks before it; both come after the main stream's wait.
4. Attention n reads the tokens' new slots after the same wait, and later forwards follow it in
   order.
5. Within a step a slot may be a parked token's and then a destination, of a relocated or a restored
   one. Copies run in the order of their launches, so it is read before it is written. For
   relocations among themselves see `copy_engine`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vtoken.vllm.cuda.copies.streams import Stream, Streams


class StagedCopies:
    """One worker's copies in stage order: `launch` … `guard` … `forward_ended`, every step."""

    def __init__(self, streams: Streams, *, sync: bool = False) -> None:
        self._streams = streams
        self._sync = sync
        self._forward_end: Any = None
        self._pending: Any = None
        self._is_pending = False

    def launch(self, work: Callable[[], None]) -> Any:
        """Launch `work`, which reads or writes the cache, after the last forward and after what was
        launched here before. Returns an event of its end, on the relocation stream.
        """
        if self._forward_end is None:  # no forward yet: wait for everything launched so far
            self._forward_end = self._streams.record(Stream.MAIN)
        self._streams.wait(Stream.RELOCATION, self._forward_end)
        self._streams.launch(Stream.RELOCATION, work)
        self._pending = self._streams.record(Stream.RELOCATION)
        self._is_pending = True
        if self._sync:
            self.finish()
        return self._pending

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
