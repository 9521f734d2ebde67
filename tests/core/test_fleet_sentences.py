"""What is wrong with several engines as a whole, in one sentence: pure functions over rows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import structs

from tests.support.core.live import make_quiet
from vtoken import wire
from vtoken.sentences import fleet_findings, fleet_sentence
from vtoken.wire.fleet import differences, drifts


@pytest.fixture(scope="module")
def document() -> tuple[wire.Status, wire.ConfigDocument]:
    """The status and the configuration of an idle engine."""
    with make_quiet() as core:
        return core.reporter.status(), msgspec.convert(core.call("config"), wire.ConfigDocument)


def row(
    status: wire.Status, engine: int, *, waiting: int = 0, free: int | None = None, **more: Any
) -> wire.EngineRow:
    requests = structs.replace(status.requests, waiting=waiting)
    blocks = status.blocks if free is None else structs.replace(status.blocks, free=free)
    fields = {name: more.pop(name) for name in list(more) if hasattr(status, name)}
    changed = structs.replace(status, requests=requests, blocks=blocks, **fields)
    return wire.EngineRow(engine=engine, status=changed, **more)


@pytest.fixture
def status(document: tuple[wire.Status, wire.ConfigDocument]) -> wire.Status:
    return document[0]


def test_engines_that_agree_are_said_to_agree(status: wire.Status) -> None:
    rows = [row(status, n) for n in range(3)]
    assert fleet_sentence(rows) == "3 engines, all answer and run the same configuration"
    assert fleet_findings(rows) == []


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ((0, 1, 30), "engine 2 has 30 waiting requests, the others none or few"),
        ((4, 4, 12), "engine 2 holds 3 times the waiting requests of the others"),
        ((5, 4, 12), ""),  # less than three times
        ((0, 0, 7), ""),  # too few to matter
        ((12, 40), "engine 1 holds 3 times the waiting requests of the other"),
        ((40,), ""),
    ],
)
def test_an_imbalance_of_waiting_requests_is_named(
    status: wire.Status, waiting: tuple[int, ...], expected: str
) -> None:
    found = fleet_findings([row(status, n, waiting=w) for n, w in enumerate(waiting)])
    assert [one.text for one in found] == ([expected] if expected else [])


def test_an_engine_that_is_short_of_memory_beside_others_is_named(status: wire.Status) -> None:
    total = status.blocks.total
    rows = [row(status, n, free=free) for n, free in enumerate((total // 2, 3, total // 2))]
    (found,) = fleet_findings(rows)
    assert (found.fault, found.members) == ("memory", (1,))
    assert found.text == "engine 1 has 5% of its blocks free, the others 49%"
    assert fleet_findings([row(status, n, free=3) for n in range(3)]) == []


def test_a_slow_engine_is_named_once_there_are_samples(status: wire.Status) -> None:
    def with_p95(p95_ms: float, count: int) -> wire.Latency:
        one = wire.Percentiles(count, p95_ms=p95_ms)
        return wire.Latency(window_s=60.0, ttft=one, inter_token=one)

    rows = [row(status, n, latency=with_p95(ms, 20)) for n, ms in enumerate((30, 30, 120))]
    assert fleet_sentence(rows) == (
        "engine 2 is 4 times as slow as the others: p95 120 ms between tokens"
    )
    rows = [row(status, n, latency=with_p95(ms, 19)) for n, ms in enumerate((30, 30, 120))]
    assert fleet_findings(rows) == []


def test_silence_comes_before_drift_and_drift_before_imbalance(status: wire.Status) -> None:
    rows = [
        row(status, 0, revision=11, drift={"theta_f": [0.5, 0.25]}),
        row(status, 1, revision=12, waiting=40),
        row(status, 2, revision=12, problem="no message", silent_s=12.4),
        wire.EngineRow(engine=3, status=None, revision=12, problem="401: needs a token"),
    ]
    assert [found.text for found in fleet_findings(rows)] == [
        "engine 2 does not answer, the newest state is 12 s old",
        "engine 3 does not answer: 401: needs a token",
        "engines 1, 2, 3 run revision 12, engine 0 11",
        "engine 1 has 40 waiting requests, the other none or few",
    ]


def test_the_change_is_named_and_on_a_tie_no_engine_is_blamed(
    document: tuple[wire.Status, wire.ConfigDocument],
) -> None:
    status, config = document
    made = wire.Made("root", status.ts - 40, ["theta_f"])
    changed = structs.replace(
        config, revision=2, made=made, desired=structs.replace(config.desired, theta_f=0.75)
    )
    one, other = config.desired.theta_f, 0.75

    def said(*configs: wire.ConfigDocument, names: tuple[str, ...] = ()) -> str:
        found = differences(dict(enumerate(configs)))
        rows = [
            row(status, n, revision=c.revision, made=c.made, drift=found[n])
            for n, c in enumerate(configs)
        ]
        return fleet_sentence(rows, names)

    assert differences({0: config, 1: changed}) == {
        0: {"theta_f": [one, other]},
        1: {"theta_f": [other, one]},
    }
    only = "root changed theta_f on engine 1 only, 40 s ago"
    remedy = "vtoken sync --engine 1, or vtoken undo --engine 1"
    assert said(config, changed) == f"{only}: {remedy}"
    assert said(config, changed, config) == f"{only}: {remedy}"
    assert said(changed, config, changed) == (
        "root changed theta_f 40 s ago, not on engine 1: vtoken sync --engine 0"
    )
    assert said(config, config, changed, changed) == (
        "root changed theta_f on engines 2, 3 only, 40 s ago: vtoken sync --engine 2"
    )
    # Servers count their own revisions.
    assert said(config, changed, names=("gpu7", "gpu8")) == (
        f"gpu7, gpu8 differ: theta_f {one} and {other}"
    )
    assert said(config, changed, config, names=("gpu7", "gpu8", "gpu9")) == (
        f"gpu8 differs from the others: theta_f {other} where the others have {one}"
    )


def test_old_states_of_silent_engines_are_not_compared(status: wire.Status) -> None:
    rows = [row(status, 0), row(status, 1, waiting=90, problem="no message", silent_s=9)]
    assert [found.fault for found in fleet_findings(rows)] == ["silent"]


def test_mixed_versions_are_named_by_the_names_of_the_servers(status: wire.Status) -> None:
    rows = [row(status, 0), row(status, 0), row(status, 0, vtoken_version="0.0.1")]
    text = fleet_sentence(rows, ["gpu7", "gpu8", "gpu9"])
    assert text == f"gpu9 runs vToken 0.0.1, all others {status.vtoken_version}"


def test_drift_is_against_most_engines_of_the_same_model(
    document: tuple[wire.Status, wire.ConfigDocument],
) -> None:
    status, config = document
    other = structs.replace(config, desired=structs.replace(config.desired, theta_f=0.75))
    usual = config.desired.theta_f
    found = drifts({0: (status, config), 1: (status, other), 2: (status, config)})
    assert found == {0: {}, 1: {"theta_f": [0.75, usual]}, 2: {}}
    alone = structs.replace(status, model="another")
    assert drifts({0: (status, config), 1: (alone, other)}) == {0: {}, 1: {}}


def test_settings_that_follow_the_pool_are_compared_in_equal_pools_only(
    document: tuple[wire.Status, wire.ConfigDocument],
) -> None:
    status, config = document
    other = structs.replace(config, desired=structs.replace(config.desired, headroom_blocks=1))
    larger = structs.replace(status, blocks=structs.replace(status.blocks, total=1000))
    assert drifts({0: (status, config), 1: (larger, other)}) == {0: {}, 1: {}}
    found = drifts({0: (status, config), 1: (status, other), 2: (status, config)})
    assert list(found[1]) == ["headroom_blocks"]


def test_a_server_that_knows_no_evict_when_equals_those_that_evict_always(
    document: tuple[wire.Status, wire.ConfigDocument],
) -> None:
    status, config = document
    old = msgspec.to_builtins(config)
    for part in ("desired", "effective", "bounds"):
        del old[part]["evict_when"]
    old_config = msgspec.convert(old, wire.ConfigDocument)
    always = structs.replace(config, desired=structs.replace(config.desired, evict_when="always"))
    assert drifts({0: (status, old_config), 1: (status, always)}) == {0: {}, 1: {}}
    pressure = structs.replace(always.desired, evict_when="pressure")
    other = structs.replace(config, desired=pressure)
    found = drifts({0: (status, old_config), 1: (status, always), 2: (status, other)})
    assert found == {0: {}, 1: {}, 2: {"evict_when": ["pressure", "always"]}}
