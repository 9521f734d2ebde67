"""The fleet page's part of a frame: a row an engine, and what is wrong with all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from vtoken.sentences import fleet_findings
from vtoken_console.feed.connection import State
from vtoken_console.frame.silence import is_link_silent, is_overdue

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from vtoken import wire
    from vtoken.client import Server
    from vtoken.sentences import Fault, Finding
    from vtoken.wire.reducer import StreamState
    from vtoken_console.feed.fleet import Fleet, Member

Condition = Literal["live", "paused", "starting", "silent", "lost", "refused"]
# A row of these answers, or has not been asked for long.
GOOD: frozenset[Condition] = frozenset({"live", "paused", "starting"})


@dataclass(frozen=True, slots=True, eq=False)
class FleetRow:
    """One engine, or a server that has not answered yet.

    `label`: its name in the table; `name`: in sentences. `since_s`: for how long it does not
    answer. `problem`: why. `blocks`: its newest `live` and `flags` [N]; they change in place.
    `version` rises with every new state. `faults`: what is wrong with it beside the others.
    """

    server: Server
    rank: int | None
    label: str
    name: str
    condition: Condition
    since_s: float
    problem: str
    model: StreamState
    blocks: Mapping[str, npt.NDArray[Any]]
    version: int
    tokens_per_s: float
    engine: wire.EngineRow
    faults: frozenset[Fault] = frozenset()

    @property
    def key(self) -> tuple[str, int | None]:
        """Identifies the row from frame to frame."""
        return self.server.url, self.rank

    @property
    def status(self) -> wire.Status | None:
        return self.model.status

    @property
    def revision(self) -> int:
        return self.engine.revision

    @property
    def drift(self) -> dict[str, list[Any]]:
        """Field -> [here, in most engines]."""
        return self.engine.drift

    @property
    def answers(self) -> bool:
        return self.condition in GOOD


@dataclass(frozen=True, slots=True, eq=False)
class FleetView:
    """`findings`: the worst first."""

    rows: Sequence[FleetRow]
    findings: Sequence[Finding]
    num_servers: int

    @property
    def num_silent(self) -> int:
        return sum(not row.answers for row in self.rows)


class FleetReader:
    """Makes the newest `FleetView`; compares configurations when one of them is new."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._configs: list[wire.ConfigDocument | None] = []
        self._drifts: dict[int, dict[str, list[Any]]] = {}

    def view(self, now: float, monotonic: float) -> FleetView:
        """`now`: Unix seconds; `monotonic`: seconds."""
        from vtoken import wire

        members = [*self.fleet.members]
        several = len(self.fleet.servers) > 1
        drifts = self._compare(members)
        rows = []
        for number, member in enumerate(members):
            feed = member.feed
            model, config = feed.model, feed.model.config
            condition, since_s, problem = condition_of(member, now, monotonic)
            label, name = names_of(member, several=several)
            row = FleetRow(
                server=member.server,
                rank=member.rank,
                label=label,
                name=name,
                condition=condition,
                since_s=since_s,
                problem=problem,
                model=model,
                blocks=feed.data.blocks,
                version=feed.data.version,
                tokens_per_s=feed.data.tokens_per_s,
                engine=wire.EngineRow(
                    engine=member.rank or 0,
                    status=model.status,
                    revision=config.revision if config is not None else 0,
                    drift=drifts.get(number, {}),
                    problem="" if condition in GOOD else problem,
                    silent_s=since_s,
                    made=config.made if config is not None else None,
                ),
            )
            rows.append(row)
        findings = fleet_findings([row.engine for row in rows], [row.name for row in rows])
        return FleetView(_with_faults(rows, findings), findings, len(self.fleet.servers))

    def _compare(self, members: Sequence[Member]) -> dict[int, dict[str, list[Any]]]:
        from vtoken.wire.fleet import drifts

        models = [member.feed.model for member in members]
        configs = [model.config for model in models]
        if configs != self._configs:  # most are the same objects: this costs little
            self._configs = configs
            self._drifts = drifts(
                {
                    n: (model.status, model.config)
                    for n, model in enumerate(models)
                    if model.status is not None and model.config is not None
                }
            )
        return self._drifts


def condition_of(member: Member, now: float, monotonic: float) -> tuple[Condition, float, str]:
    """The condition of a row, for how long it does not answer [s], and why."""
    feed = member.feed
    connection, model = feed.connection, feed.model
    if not connection.is_live:
        if not connection.failures:
            return "starting", 0.0, ""
        refused = connection.state is State.REFUSED or connection.error[:1].isdigit()
        return (
            ("refused" if refused else "lost"),
            max(0.0, now - connection.since),
            connection.error,
        )
    age_s = monotonic - feed.received
    if is_link_silent(age_s):
        return "silent", age_s, "no message from the server"
    status = model.status
    if status is None:
        return "starting", 0.0, ""
    silent_s = model.ts + age_s - status.ts
    if is_overdue(silent_s, model.hello):
        return "silent", silent_s, "the engine makes no step and does not answer"
    return ("live" if status.scheduling == "running" else "paused"), 0.0, ""


def names_of(member: Member, *, several: bool) -> tuple[str, str]:
    """Label and name: `1` and `engine 1` of the only server; of several `gpu7`, or `gpu7/1`."""
    if not several:
        rank = member.rank
        return (member.server.label,) * 2 if rank is None else (f"{rank}", f"engine {rank}")
    label = member.server.label
    if member.rank is not None and member.num_engines > 1:
        label += f"/{member.rank}"
    return label, label


def _with_faults(rows: Sequence[FleetRow], findings: Sequence[Finding]) -> list[FleetRow]:
    faults: dict[int, set[Fault]] = {}
    for finding in findings:
        for member in finding.members:
            faults.setdefault(member, set()).add(finding.fault)
    return [
        replace(row, faults=frozenset(faults[n])) if n in faults else row
        for n, row in enumerate(rows)
    ]


ORDERS = ("fleet", "state", "waiting", "free", "holes", "tokens a second", "p95")


def ordered(rows: Sequence[FleetRow], order: str) -> list[FleetRow]:
    """`rows` in one of ORDERS: what is worst or most comes first; rows without a status last."""
    if order == "fleet":
        return [*rows]
    if order == "state":
        return sorted(rows, key=lambda row: (row.answers, not row.faults))
    return sorted(rows, key=lambda row: _place(row, order))


def _place(row: FleetRow, order: str) -> tuple[bool, float]:
    status = row.status
    if status is None or not row.answers:
        return True, 0.0
    p95_ms = status.latency.inter_token.p95_ms if status.latency is not None else None
    value = {
        "waiting": -status.requests.waiting,
        "free": status.blocks.free / max(1, status.blocks.total),
        "holes": -status.fragmentation.f,
        "tokens a second": -row.tokens_per_s,
        "p95": -(p95_ms or 0.0),
    }[order]
    return False, value


def matches(row: FleetRow, text: str) -> bool:
    """Whether every word of `text` is in the row's name, model, policy or state."""
    status = row.status
    words = [row.name, row.condition, *row.faults]
    words += [status.model, status.policy.name] if status is not None else []
    words += ["differs"] if row.drift else []
    found = " ".join(words).lower()
    return all(word in found for word in text.lower().split())
