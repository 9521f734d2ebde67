"""The recorder: writes the stream of one engine to its flight recording, always.

It is a passive client of the hub. While no other client wants state, it polls the engine once a
second, less often while the engine is idle.

1. After an error the recording continues with the events that it missed.
2. An error of disk or engine stops the recording, not the server: the flight has the reason, and
   recording resumes by itself.
"""

from __future__ import annotations

import asyncio
import contextlib

from vtoken.recording import RecordingError
from vtoken_api.fanout.cursor import TOPICS
from vtoken_api.fanout.hub import Hub
from vtoken_api.fanout.subscriber import StreamQuery, Subscriber
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError
from vtoken_api.state.journal import Journal

STATE_S = 1.0  # between two states while the engine takes steps
IDLE_STATE_S = 2.0
PERIOD_S = 5.0  # between two attempts to record


class Recorder:
    """Of one engine."""

    def __init__(self, hub: Hub, journal: Journal) -> None:
        self._hub = hub
        self._journal = journal
        self._flight = journal.flights[hub.rank]
        self._resume: tuple[str, int] | None = None

    async def run(self) -> None:
        """Record until cancelled; the open segment is completed."""
        try:
            await asyncio.gather(self._record(), self._keep_fresh(), return_exceptions=True)
        finally:
            await self._end()  # `_record` may have been cancelled in it

    async def _record(self) -> None:
        while True:
            try:
                await self._journal.acquire()
                await self._record_stream()
            except ProblemError as error:
                problem = f"the engine does not answer: {error.problem.detail}"
                self._flight.stop(problem, fault=False)
            except (RecordingError, OSError) as error:  # a TimeoutError: a disk that hangs
                self._flight.stop(str(error) or "the disk does not answer", fault=True)
            except Exception as error:
                logger.exception("vtoken: the flight recorder failed; restarting it")
                self._flight.stop(f"internal error: {error}", fault=True)
            await asyncio.sleep(PERIOD_S)

    async def _record_stream(self) -> None:
        query = StreamQuery(frozenset(TOPICS), fps=1.0 / STATE_S, packed=False, resume=self._resume)
        subscriber = Subscriber(self._hub, query, self._flight.take, passive=True)
        self._hub.join(subscriber)
        try:
            await subscriber.prepare()
            await self._flight.begin()
            await subscriber.run(read_only_reason="this is a recording")
        finally:
            self._hub.leave(subscriber)
            self._resume = subscriber.resume_from or self._resume
            await self._end()

    async def _keep_fresh(self) -> None:
        pause = STATE_S
        while True:
            await asyncio.sleep(pause)
            if self._flight.recording:
                before = self._hub.state
                with contextlib.suppress(ProblemError):
                    state = await self._hub.current()
                    idle = before is not None and before.step == state.step
                    pause = IDLE_STATE_S if idle else STATE_S

    async def _end(self) -> None:
        """Complete the open segment; reports errors instead of raising, also on exit."""
        try:
            await self._flight.end()
        except (RecordingError, OSError) as error:
            self._flight.stop(str(error) or "the disk does not answer", fault=True)
