"""Bad commands are refused with 400 or 422; an internal error is not reported as a bad command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.support.core.harness import LiveEngine, make_engine
from vtoken.wire import Reply


@pytest.fixture
def engine() -> Iterator[LiveEngine]:
    with make_engine(concurrency=1) as live:
        live.steps(2)
        yield live


@pytest.mark.parametrize(
    ("op", "args", "status"),
    [
        ("nothing", {}, 400),
        ("status", {"x": 1}, 400),
        ("block", {}, 400),
        ("block", {"id": 84}, 404),
        ("block", {"id": -1}, 422),
        ("block", {"id": "1"}, 422),
        ("block", {"id": True}, 422),
        ("request", {"request_id": "nobody"}, 404),
        ("request", {"request_id": []}, 422),
        ("operation", {"id": 7}, 422),
        ("compact", {"request_id": {}}, 422),
        ("tokens", {"request_id": "nobody"}, 404),
        ("tokens", {"request_id": "req-0", "start": -1}, 422),
        ("tokens", {"request_id": "req-0", "limit": 0}, 422),
        ("tokens", {"request_id": "req-0", "limit": 10_001}, 422),
        ("events", {"after": -1}, 422),
        ("events", {"limit": 1.0}, 422),
        ("patch_config", {}, 400),
        ("patch_config", {"patch": {}, "if_match": "1"}, 422),
        ("preview", {"change": {"op": "patch_config", "patch": {}, "if_match": "1"}}, 422),
        ("patch_config", {"patch": {}, "actor2": "x"}, 400),
        ("tokens", {"start": 0}, 400),
        ("compact", {"actor_name": "me"}, 400),
    ],
)
def test_bad_commands_are_refused_with_a_reason_and_change_nothing(
    engine: LiveEngine, op: str, args: dict[str, Any], status: int
) -> None:
    before = (engine.core.runtime.events.last_seq, engine.core.runtime.revision)
    reply = engine.ask(op, **args)
    assert reply.problem is not None
    assert reply.problem.status == status
    assert reply.problem.detail
    if status == 400 and op != "nothing":
        assert reply.problem.title == "Bad command"
        assert reply.problem.detail.startswith(f"{op}: ")
    assert (engine.core.runtime.events.last_seq, engine.core.runtime.revision) == before


def test_garbage_on_the_bus_is_answered_with_a_problem(engine: LiveEngine) -> None:
    reply = msgspec.msgpack.decode(engine.controller.handle_bytes(b"\xc1garbage"), type=Reply)
    assert reply.problem is not None
    assert reply.problem.status == 400


def test_a_type_error_inside_an_operation_is_not_the_callers_fault(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised by the engine, and the API answers 500."""
    monkeypatch.setattr(engine.reporter, "status", lambda: None + 1)  # type: ignore[operator]
    with pytest.raises(TypeError):
        engine.ask("status")
