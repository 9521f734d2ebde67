"""What is told of parked tokens: status, rows, tokens, texts, dry runs, and the call for them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.core.live import LiveEngine, make_quiet
from vtoken.wire import Parking, Status
from vtoken.wire.metrics import METRICS

CUT = {
    "policy": {"name": "streaming_llm"},
    "evict_when": "always",
    "budget_tokens": 64,
    "interval_tokens": 0,
    "park_bytes": 1 << 20,
    "restore_after_ms": 0,
}


def cut(**config: Any) -> LiveEngine:
    """Two requests that were cut to 64 tokens; what they lost is parked."""
    live = make_quiet()
    live.configure(**CUT | config)
    live.admit("a", 160)
    live.admit("b", 200)
    live.steps(3)
    return live


def parked(live: LiveEngine) -> Parking:
    """The document, after a check that everything else says the same."""
    status: Status = live.call("status")
    found, rows = status.parking, live.call("requests")
    assert found is not None
    assert found.tokens == sum(row.parked_tokens for row in rows)
    token_bytes = live.runtime.geometry.bytes_per_token
    assert found.used_bytes == (found.tokens + found.clean_tokens) * token_bytes
    assert found.used_bytes <= found.peak_bytes <= found.capacity_bytes
    assert found.copied_tokens >= found.tokens + found.dropped_tokens
    values = {m.name: v for m in METRICS for _, v in m.read(status)}
    assert values["parked_tokens"] == found.tokens
    assert values["park_used_bytes"] == found.used_bytes
    for row in rows:
        assert row.parked_tokens <= row.dead
        assert live.call("request", request_id=row.id).parked_tokens == row.parked_tokens
        tokens = live.call("tokens", request_id=row.id, limit=4096).rows
        texts = live.call("text", request_id=row.id, limit=4096).page.rows
        assert sum(token.parked for token in tokens) == row.parked_tokens
        assert not any(token.parked and token.live for token in tokens)
        assert [t.parked for t in texts] == [t.parked for t in tokens][: len(texts)]
    return found


def restored(live: LiveEngine, steps: int = 20) -> int:
    """How many tokens come back in the next steps."""
    before = live.runtime.counters.parking.restored_tokens
    live.steps(steps)
    return live.runtime.counters.parking.restored_tokens - before


def reasons(live: LiveEngine) -> set[str]:
    """Why tokens came back so far."""
    return {event.data["reason"] for event in live.call("events", kind="restored").events}


def test_nothing_is_said_while_parking_is_off() -> None:
    with cut(park_bytes=0) as live:
        status: Status = live.call("status")
        assert status.parking is None
        assert sum(row.dead for row in live.call("requests")) > 0
        assert not any(row.parked_tokens for row in live.call("requests"))
        assert not [m for m in METRICS if m.name.startswith("park") and [*m.read(status)]]


def test_status_rows_tokens_texts_and_metrics_say_the_same() -> None:
    with cut() as live:
        found = parked(live)
        assert found.tokens == sum(row.dead for row in live.call("requests")) > 0
        assert found.capacity_bytes == 1 << 20
        assert found.waits_for == "budget"
        (event, *_) = [e for e in live.call("events", kind="eviction").events if e.data["tokens"]]
        assert event.data["parked"] == event.data["tokens"]
        live.call("patch_config", patch={"budget_tokens": 96})
        assert restored(live) > 0
        found = parked(live)
        assert found.clean_tokens > 0
        assert found.copied_tokens == found.tokens + found.clean_tokens


@pytest.mark.parametrize(
    ("change", "all_of_them"),
    [
        ({"budget_tokens": 96}, False),
        ({"budget_tokens": 1000}, True),
        ({"evict_when": "pressure"}, True),
        ({"policy": {"name": "none"}}, True),
        ({"budget_tokens": 32}, False),
        ({"reclamation": "paused", "budget_tokens": 1000}, False),
    ],
)
def test_a_dry_run_promises_what_then_comes_back(change: dict[str, Any], all_of_them: bool) -> None:
    with cut() as live:
        tried = live.call("patch_config", patch=change, validate_only=True).what_if
        num_parked = parked(live).tokens
        assert tried.without_change.restored_tokens == tried.dropped_tokens == 0
        assert (tried.restored_tokens == num_parked) is all_of_them
        live.call("patch_config", patch=change)
        # What requests append under a fixed budget takes the place of what could come back.
        assert tried.restored_tokens - 2 * 20 <= restored(live) <= tried.restored_tokens


def test_a_dry_run_promises_no_more_than_fits() -> None:
    with cut() as live:
        config, change = live.runtime.config, {"evict_when": "pressure"}
        spare = live.runtime.restorer.spare_blocks(config)
        live.configure(**CUT, low_watermark_blocks=config.low_watermark_blocks + spare - 2)
        tried = live.call("patch_config", patch=change, validate_only=True).what_if
        assert 0 < tried.restored_tokens < parked(live).tokens
        live.call("patch_config", patch=change)
        assert 0 < restored(live, 1) <= tried.restored_tokens


def test_an_undo_brings_back_what_the_change_took() -> None:
    with cut(budget_tokens=1000) as live:
        live.call("patch_config", patch={"budget_tokens": 64})
        live.steps(2)
        num_lost = parked(live).tokens
        tried = live.call("preview", change={"op": "undo"}).what_if
        assert tried.restored_tokens == num_lost > 0
        live.call("undo")
        assert restored(live) == num_lost
        assert reasons(live) == {"budget"}
        assert parked(live).tokens == 0


def test_a_guard_that_fires_brings_back_what_the_change_took() -> None:
    with cut(budget_tokens=1000) as live:
        guard = {"metric": "evicted_tokens", "above": 0}
        live.call("patch_config", patch={"budget_tokens": 64}, guards=[guard], guard_for_s=60)
        live.steps(1)
        assert parked(live).tokens > 0
        live.steps(20)
        assert live.runtime.config.budget_tokens == 1000
        assert parked(live).tokens == 0
        assert reasons(live) == {"guard"}
        assert live.runtime.counters.parking.restored_tokens > 0


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_smaller_memory_loses_what_its_dry_run_says(share: float) -> None:
    with cut() as live:
        before = parked(live)
        change = {"park_bytes": int(share * before.used_bytes)}
        tried = live.call("patch_config", patch=change, validate_only=True).what_if
        assert 0 < tried.dropped_tokens <= before.tokens
        (note,) = live.call("patch_config", patch=change).notes[-1:]
        assert (
            note == f"{tried.dropped_tokens} parked tokens lose their copies, and cannot come back"
        )
        live.steps(1)
        assert (live.call("status").parking is None) is (share == 0)
        event, *_ = live.call("events", kind="parking").events
        assert event.data == {"dropped": tried.dropped_tokens, "reason": "setting"}


# ---------------------------------------------------------------- the call


def test_asked_for_tokens_come_back_without_the_wait() -> None:
    with make_quiet(60) as live:
        hour = {"evict_when": "pressure", "restore_after_ms": 3_600_000}
        live.configure(**CUT | hour)
        for name, length in (("a", 300), ("b", 250), ("c", 450)):
            live.admit(name, length)
            live.steps(2)
        live.finish("c")
        live.steps(2)
        before = {row.id: row.parked_tokens for row in live.call("requests")}
        assert min(before.values()) > 0
        assert restored(live) == 0
        assert parked(live).waits_for == "time"
        tried = live.call("restore", request_id="a", dry_run=True)
        assert (tried.parked_tokens, tried.restorable_tokens) == (before["a"], before["a"])
        assert (tried.waits_for, tried.notes) == ("", [])
        assert restored(live) == 0
        assert live.call("restore", request_id="a") == tried
        assert restored(live) == before["a"]
        assert reasons(live) == {"asked"}
        assert {row.id: row.parked_tokens for row in live.call("requests")} == before | {"a": 0}
        again = live.call("restore", request_id="a")
        assert (again.parked_tokens, again.notes) == (0, ["none of its tokens is parked"])


@pytest.mark.parametrize(
    ("change", "waits_for", "note"),
    [
        ({}, "budget", "they exceed its budget, and stay parked"),
        ({"budget_tokens": 80}, "budget", "the others exceed its budget, and stay parked"),
        (
            {"reclamation": "paused"},
            "resume",
            "they come back once reclamation is resumed: it is paused",
        ),
        ({"evict_when": "pressure", "headroom_blocks": 32}, "", None),
    ],
)
def test_the_call_says_why_not_all_come_back(
    change: dict[str, Any], waits_for: str, note: str | None
) -> None:
    with cut() as live:
        live.configure(**CUT | change)
        found = live.call("restore", request_id="a", dry_run=True)
        assert (found.waits_for, found.notes) == (waits_for, [note] if note else [])
        assert (found.restorable_tokens < found.parked_tokens) is bool(waits_for)


def test_the_call_says_that_memory_is_lacking() -> None:
    with cut() as live:
        live.configure(**CUT | {"evict_when": "pressure"})
        live.core.store.take(live.core.store.num_free_blocks())
        found = live.call("restore", request_id="a")
        assert (found.restorable_tokens, found.waits_for) == (0, "memory")
        assert found.notes == ["they come back as soon as memory is free"]


def test_a_request_that_waits_or_is_not_there_has_nothing_parked() -> None:
    with cut() as live:
        live.admit("c", 1000)
        live.steps(1)
        assert live.call("restore", request_id="c").parked_tokens == 0
        refused = live.ask("restore", request_id="nobody")
        assert refused.problem is not None
        assert refused.problem.status == 404
