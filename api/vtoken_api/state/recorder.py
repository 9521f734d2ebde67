"""The recorder: feeds the journal with the stream, always, and with the engine's own actions.

It is a passive client of the hub. While no other client wants state, it polls the engine once a
second, less often while the engine is idle.

1. After an error the recording continues with the events that it missed.
2. An error of disk or engine stops the recording, not the server: `problem` has the reason,
   `num_faults` counts those of the disk, and recording resumes by itself.
3. No call ends a trial that the engine reverts or keeps. Such events are fetched from the engine,
   so none is missed; an arriving event only triggers the fetch.
4. A trial that ended with its engine has no event. The next engine's recorder finds it in the audit
   log, by the entry of its begin alone, and enters its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from vtoken import wire
from vtoken.recording import RecordingError
from vtoken_api.fanout.cursor import TOPICS
from vtoken_api.fanout.hub import Hub
from vtoken_api.fanout.subscriber import StreamQuery, Subscriber
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError
from vtoken_api.state.journal import Journal

STATE_S = 1.0  # between two states while the engine takes steps
IDLE_STATE_S = 2.0
RECENT_ENTRIES = 1000  # of the audit log, that a new process looks through
ENDED = "ended with a change on trial"
OF_TRIALS = frozenset({"trial", "confirm", "undo", "revert", "keep", ENDED})  # actions
PERIOD_S = 5.0  # between two attempts to record, and two fetches of actions without an event


class Recorder:
    """Of one engine; `start` once, inside the event loop. Each subscriber, and the recorder itself,
    subscribes to the hub. `on_end`: called with the end of each trial, in order.
    """

    wants_state = False
    is_client = False

    def __init__(self, hub: Hub, journal: Journal, engine: int = 0) -> None:
        self.recording = False  # by this process, now
        self.problem = ""  # why it stopped; empty while it does not
        self.stopped_ts = 0.0  # when it stopped
        self.num_faults = 0  # failed writes
        self._hub = hub
        self._journal = journal
        self._flight = journal.flights[engine]
        self._engine = engine
        self.on_end: Callable[[wire.TrialEnd], None] = lambda _: None
        self._resume: tuple[str, int] | None = None
        self._seen: int | None = None  # `seq` of the newest event; None before the first look
        self._acted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin, in the background."""
        self._hub.join(self)
        for work in (self._record(), self._keep_fresh(), self._enter_actions()):
            self._tasks.append(asyncio.create_task(work, name="vtoken-recorder"))

    async def close(self) -> None:
        """Stop; the open segment is completed."""
        self._hub.leave(self)
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end()  # the task may have been cancelled in it

    # ------------------------------------------------------------ the stream

    async def _record(self) -> None:
        while True:
            try:
                await self._journal.acquire()
                await self._record_stream()
            except ProblemError as error:
                self._stop(f"the engine does not answer: {error.problem.detail}", fault=False)
            except (RecordingError, OSError) as error:  # a TimeoutError: a disk that hangs
                self._stop(str(error) or "the disk does not answer", fault=True)
            except Exception as error:
                logger.exception("vtoken: the flight recorder failed; restarting it")
                self._stop(f"internal error: {error}", fault=True)
            await asyncio.sleep(PERIOD_S)

    async def _record_stream(self) -> None:
        query = StreamQuery(frozenset(TOPICS), fps=1.0 / STATE_S, packed=False, resume=self._resume)
        subscriber = Subscriber(self._hub, query, self._flight.take, passive=True)
        self._hub.join(subscriber)
        try:
            await subscriber.prepare()
            await self._flight.begin()
            if self.problem:
                logger.info("vtoken: the flight recorder is recording again")
            self.recording, self.problem = True, ""
            await subscriber.run(read_only_reason="this is a recording")
        finally:
            self.recording = False
            self._hub.leave(subscriber)
            self._resume = subscriber.resume_from or self._resume
            await self._end()

    def _stop(self, problem: str, *, fault: bool) -> None:
        if not self.problem:  # later ones, often the same with another file name, are no news
            self.stopped_ts = time.time()
            logger.warning("vtoken: the flight recorder stopped: %s", problem)
        self.problem = problem
        self.num_faults += fault

    async def _keep_fresh(self) -> None:
        pause = STATE_S
        while True:
            await asyncio.sleep(pause)
            if self.recording:
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
            self._stop(str(error) or "the disk does not answer", fault=True)

    # ------------------------------------------------------------ the engine's own actions

    def offer(self, events: list[wire.Event], lost: int) -> None:
        """Note whether a trial may have ended; called by the hub."""
        if lost or any(wire.TrialEnd.of(event) for event in events):
            self._acted.set()

    def wake(self) -> None:
        """Do nothing: a subscriber records the state."""

    async def _enter_actions(self) -> None:
        while True:
            self._acted.clear()
            try:
                await self._journal.probe()
                await self._catch_up()
            except ProblemError:
                pass  # the engine does not answer now
            except Exception:
                logger.exception("vtoken: cannot enter the engine's actions; retrying")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._acted.wait()

    async def _catch_up(self) -> None:
        """Enter how trials ended, and pass it on."""
        described = await self._hub.describe()
        if self._seen is None:
            entries = (await self._journal.entries(RECENT_ENTRIES)).entries
            self._enter_ended(entries, described.started_ts)
            self._seen = 0
        page = await self._hub.config_events(self._seen)
        while page.events:
            for event in page.events:
                self._seen = event.seq
                if (end := wire.TrialEnd.of(event)) is not None:
                    if end.confirmed is None:
                        self._journal.enter(_entry(event, end, described.epoch, self._engine))
                    self.on_end(end)
            page = await self._hub.config_events(self._seen)
        self._seen = max(self._seen, page.last_seq)

    def _enter_ended(self, entries: Sequence[wire.AuditEntry], started_ts: float) -> None:
        """Enter the end of a trial that began before this engine and that nothing has ended."""
        of_trials = [
            entry
            for entry in entries
            if entry.action in OF_TRIALS
            and not entry.dry_run
            and entry.engine in (None, self._engine)
        ]
        newest = of_trials[-1] if of_trials else None
        if newest is not None and newest.action == "trial" and newest.ts < started_ts:
            self._journal.enter(
                wire.AuditEntry(
                    ts=time.time(),
                    actor="engine",
                    action=ENDED,
                    changes={},
                    revision=newest.revision,
                    dry_run=False,
                    engine=self._engine,
                )
            )


def _entry(event: wire.Event, end: wire.TrialEnd, epoch: str, engine: int) -> wire.AuditEntry:
    return wire.AuditEntry(
        ts=event.ts,
        actor=end.actor,
        action="keep" if end.reverted is None else "revert",
        changes=event.data["changes"],
        revision=end.revision,
        dry_run=False,
        epoch=epoch,
        event_seq=event.seq,
        engine=engine,
    )
