"""When a step's relocations run: after the forward before them, before the attention that reads.

    main        … forward n-1 | sampling n-1 | inputs n | wait ─► forward n …
                              └─ event ─┐                  ▲
    relocation                          └─► copies n ── event

Step n's plan is executed by step n. The copies wait, on the device, for the end of forward n-1 and
then run beside sampling n-1 and the preparation of step n, none of which touches the KV cache; the
main stream waits for them right before step n first touches it. The host never waits, unless
`sync` asks for it (the ablation of paper 3.4, figure 8).

Why this is safe, with asynchronous scheduling too, where step n is planned while n-1 runs (I3):

1. What forward n-1 and all forwards before it wrote is there when the copies read: they wait for
   its end. So is what a relocation before moved: its event was waited for by forward n-1.
2. Nobody still reads what the copies overwrite. A destination is live for no step up to n-1 that is
   not finished: forwards in flight are n-1 or earlier, and end before the copies start.
3. Nobody overwrites a source before it is read. The blocks that step n's plan sets free may be
   given to other requests in the same step; their first write is part of forward n, or of vLLM's
   own clearing and copying of blocks before it, and both are behind the main stream's wait.
4. Attention n reads relocated tokens behind the same wait, and later forwards follow it in order.
5. Within a step every source is read before a destination overwrites it: see `copy_engine`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vtoken.arrays import Ints
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

    def begin(self, source: Ints, destination: Ints) -> None:
        """Launch the copies `source` [k] -> `destination` [k] behind the last forward."""
        if self._forward_end is None:  # no forward has ended yet: order behind all there is
            self._forward_end = self._streams.record(Stream.MAIN)
        self._streams.wait(Stream.RELOCATION, self._forward_end)
        self._streams.launch(Stream.RELOCATION, lambda: self._copy(source, destination))
        self._pending = self._streams.record(Stream.RELOCATION)
        self._is_pending = True
        if self._sync:
            self.finish()

    def guard(self) -> None:
        """Nothing launched on the main stream from now on touches the cache before the copies."""
        if self._is_pending:
            self._streams.wait(Stream.MAIN, self._pending)
            self._is_pending = False

    def finish(self) -> None:
        """The host waits until the copies are done: the ablation."""
        if self._is_pending:
            self._streams.synchronize(self._pending)

    def forward_ended(self) -> None:
        """The step's forward has been launched as a whole, and what reads the cache after it."""
        self._forward_end = self._streams.record(Stream.MAIN)
