"""Bad commands are refused with 400 or 422; an internal error is not reported as a bad command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.core.harness import LiveEngine, make_engine


@pytest.fixture
def engine() -> Iterator[LiveEngine]:
    live = make_engine(concurrency=1)
    live.steps(2)
    yield live
    live.close()


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("status", {"verbose": True}),
        ("block", {}),
        ("tokens", {"start": 0}),
        ("compact", {"actor_name": "me"}),
        ("patch_config", {}),
    ],
)
def test_unknown_or_missing_arguments_are_a_400(
    engine: LiveEngine, op: str, args: dict[str, Any]
) -> None:
    reply = engine.ask(op, **args)
    assert reply.problem is not None
    assert (reply.problem.status, reply.problem.title) == (400, "Bad command")
    assert reply.problem.detail.startswith(f"{op}: ")


@pytest.mark.parametrize("value", [["a"], {}, 7])
@pytest.mark.parametrize(
    ("op", "field"),
    [
        ("request", "id"),
        ("operation", "id"),
        ("tokens", "request_id"),
        ("compact", "request_id"),
    ],
)
def test_an_id_that_is_not_a_string_is_refused_by_name(
    engine: LiveEngine, op: str, field: str, value: Any
) -> None:
    reply = engine.ask(op, **{field: value})
    assert reply.problem is not None
    assert (reply.problem.status, reply.problem.field) == (422, field)
    assert reply.problem.value == value


def test_a_type_error_inside_an_operation_is_not_the_callers_fault(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised by the engine, and the API answers 500."""
    monkeypatch.setattr(engine.reporter, "status", lambda: None + 1)  # type: ignore[operator]
    with pytest.raises(TypeError):
        engine.ask("status")
