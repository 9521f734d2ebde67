"""Requests by the names that clients know: which one is meant, or why none is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.core.live import LiveEngine, make_quiet
from vtoken import wire
from vtoken.base.request_ids import short_id

RANDOM = "8ea2640e91c84f0f"
UUID = "550e8400-e29b-41d4-a716-446655440000"


@pytest.fixture
def live() -> Iterator[LiveEngine]:
    with make_quiet() as engine:
        yield engine


def admit(live: LiveEngine, *names: str, **options: int) -> None:
    for name in names:
        live.admit(name, 20, **options)
    live.steps(2)


def end(live: LiveEngine, name: str) -> None:
    live.finish(name)
    live.steps()


def found(live: LiveEngine, name: str) -> str:
    detail = live.call("request", request_id=name)
    assert isinstance(detail, wire.RequestDetail)
    return detail.id


def refused(live: LiveEngine, name: str, op: str = "request", **call: object) -> wire.Problem:
    if op == "request":
        call = {"request_id": name}
    problem = live.ask(op, **call).problem
    assert problem is not None
    assert (problem.field, problem.value) == ("request_id", name)
    return problem


@pytest.mark.parametrize(
    ("engine_id", "names"),
    [
        ("chatcmpl-job-0a1b2c3d", ("chatcmpl-job", "job")),
        (f"chatcmpl-{RANDOM}-0a1b2c3d", (f"chatcmpl-{RANDOM}", RANDOM)),
        ("0_chatcmpl-job-0a1b2c3d", ("chatcmpl-job", "job")),
        ("cmpl-job-0-0a1b2c3d", ("cmpl-job", "job")),
        ("1_cmpl-job-1-0-0a1b2c3d", ("cmpl-job-1", "job-1")),
        (f"resp_{RANDOM}_0-0a1b2c3d", (f"resp_{RANDOM}",)),
        ("mine_1-0a1b2c3d", ("mine",)),
        ("mine_1_0-0a1b2c3d", ("mine_1",)),
        (f"chatcmpl-{RANDOM}_1-0a1b2c3d", (f"chatcmpl-{RANDOM}", RANDOM)),
        ("generate-tokens-job-0a1b2c3d", ("generate-tokens-job", "job")),
        ("chatcmpl-tenant/42\n7-0a1b2c3d", ("chatcmpl-tenant/42\n7", "tenant/42\n7")),
    ],
)
def test_a_request_is_found_by_the_answers_id_and_by_the_clients(
    live: LiveEngine, engine_id: str, names: tuple[str, ...]
) -> None:
    admit(live, engine_id)
    for name in (engine_id, *names):
        assert found(live, name) == engine_id
        assert live.call("tokens", request_id=name).request_id == engine_id
        assert live.call("forget", request_id=name, spans=[(5, 6)]).request_id == engine_id
        operation = live.call("compact", request_id=name, dry_run=True)
        assert operation.request_id == engine_id
    end(live, engine_id)
    for name in (engine_id, *names):
        assert found(live, name) == engine_id
        problem = live.ask("tokens", request_id=name).problem
        assert problem is not None
        assert problem.detail == f"the request {engine_id!r} has finished, its tokens are gone"


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ("chatcmpl-job-1-2-0a1b2c3d", "chatcmpl-job-1"),
        ("chatcmpl-job-12-0a1b2c3d", "chatcmpl-job-1"),
        ("chatcmpl-job_1-0a1b2c3d", "chatcmpl-job"),
        ("cmpl-job-1-0a1b2c3d", "cmpl-job-1"),
        ("job_1_0-0a1b2c3d", "job"),
        ("0_chatcmpl-testing-0a1b2c3d", "chatcmpl-test"),
        (f"chatcmpl-{UUID}-12-0a1b2c3d", f"{UUID}-1"),
        (f"chatcmpl-{UUID}-12-0a1b2c3d", UUID),
        ("chatcmpl-1795744892123456-0a1b2c3d", "chatcmpl-1795"),
    ],
)
def test_the_beginning_of_another_clients_id_is_not_that_request(
    live: LiveEngine, other: str, name: str
) -> None:
    admit(live, other)
    problem = refused(live, name)
    assert problem.status == 404
    assert f"ids that begin with it: {other}" in problem.detail
    for op, call in (("tokens", {}), ("forget", {"spans": [(5, 6)]}), ("compact", {})):
        assert refused(live, name, op, request_id=name, **call).status == 404
    assert live.call("request", request_id=other).forgotten == []


@pytest.mark.parametrize("name", ["", "chatcmpl-", ".*", "hatcmpl-job", "job-0a1b2c3d-", "JOB"])
def test_what_no_id_begins_with_is_unknown(live: LiveEngine, name: str) -> None:
    admit(live, "0_chatcmpl-job-0a1b2c3d")
    problem = refused(live, name)
    assert problem.status == 404


@pytest.mark.parametrize(
    ("engine_id", "names"),
    [
        (f"chatcmpl-{RANDOM}-0a1b2c3d", ("8ea2", "8ea2640e", "chatcmpl-8ea2", f"{RANDOM}-0a1b2c3")),
        (f"0_chatcmpl-{UUID}-12-0a1b2c3d", ("550e8400", "550e8400-e29b", "chatcmpl-550e")),
        ("cmpl-job-1-0a1b2c3d", ("cmpl-job-1-0a1b", "job-1-0a1b2c")),
        (f"resp_{RANDOM}_0-0a1b2c3d", ("resp_8ea2",)),
        (f"chatcmpl-{UUID.replace('-', '').upper()}-0a1b2c3d", ("550E8400E29B41D4A716446655440",)),
    ],
)
def test_random_digits_abbreviate_an_id(
    live: LiveEngine, engine_id: str, names: tuple[str, ...]
) -> None:
    admit(live, engine_id, "chatcmpl-other-5f6a7b8c")
    for name in names:
        assert found(live, name) == engine_id


@pytest.mark.parametrize(
    ("engine_id", "short"),
    [
        (f"chatcmpl-{RANDOM}-0a1b2c3d", "8ea2640e"),
        (f"cmpl-{RANDOM}-0-0a1b2c3d", "8ea2640e"),
        (f"resp_{RANDOM}_0-0a1b2c3d", "8ea2640e"),
        (f"chatcmpl-{UUID}-0a1b2c3d", "550e8400"),
        ("chatcmpl-018f3c2e-7b1a-7c3d-9e5f-0123456789ab-0a1b2c3d", "0a1b2c3d"),
        ("chatcmpl-1795744892123456-0a1b2c3d", "0a1b2c3d"),
        (f"cmpl-{RANDOM}-1-0a1b2c3d", "0a1b2c3d"),
        (f"chatcmpl-{RANDOM}_1-0a1b2c3d", "0a1b2c3d"),
        (f"1_chatcmpl-{RANDOM}-0a1b2c3d", "1_0a1b2c3d"),
        ("1_cmpl-job-0-0a1b2c3d", "1_0a1b2c3d"),
        ("chatcmpl-job-12-0a1b2c3d", "job-12"),
        ("chatcmpl-conversation-12-0a1b2c3d", "0a1b2c3d"),
        ("mine", "mine"),
    ],
)
def test_a_short_id_tells_a_request_apart_and_is_one_of_its_names(
    live: LiveEngine, engine_id: str, short: str
) -> None:
    """Others are of the same answer, or of a client that counts."""
    assert short_id(engine_id) == short
    others = ("chatcmpl-job-1-4e5f6a7b", f"0_chatcmpl-{RANDOM[::-1]}-0a1b2c3e")
    admit(live, engine_id, *others)
    assert found(live, short) == engine_id
    assert [found(live, short_id(other)) for other in others] == [*others]
    end(live, engine_id)
    assert found(live, short) == engine_id


def test_a_whole_id_comes_before_an_abbreviation(live: LiveEngine) -> None:
    longer = f"chatcmpl-{RANDOM}-0a1b2c3d"
    admit(live, longer, "chatcmpl-8ea2640e-4e5f6a7b")
    assert found(live, "8ea2640e") == "chatcmpl-8ea2640e-4e5f6a7b"
    end(live, "chatcmpl-8ea2640e-4e5f6a7b")
    assert found(live, "8ea2640e") == "chatcmpl-8ea2640e-4e5f6a7b"
    problem = live.ask("forget", request_id="8ea2640e", spans=[(5, 6)]).problem
    assert problem is not None
    assert "has finished" in problem.detail
    assert live.call("request", request_id=longer).forgotten == []


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("cmpl-job", ("cmpl-job-0-0a1b2c3d", "cmpl-job-1-4e5f6a7b")),
        ("job", ("0_chatcmpl-job-0a1b2c3d", "1_chatcmpl-job-0a1b2c3d")),
        ("chatcmpl-job", ("chatcmpl-job-0a1b2c3d", "chatcmpl-job-4e5f6a7b")),
        ("job", ("chatcmpl-job-0a1b2c3d", "cmpl-job-0-4e5f6a7b")),
        ("8ea2", (f"chatcmpl-{RANDOM}-0a1b2c3d", "cmpl-8ea200000000000b-0-4e5f6a7b")),
        ("8ea2640e", (f"cmpl-{RANDOM}-0-0a1b2c3d", f"cmpl-{RANDOM}-1-4e5f6a7b")),
    ],
)
def test_a_name_of_several_requests_is_refused_with_their_ids(
    live: LiveEngine, name: str, ids: tuple[str, str]
) -> None:
    admit(live, *ids)
    problem = refused(live, name)
    assert (problem.status, problem.title) == (409, "Several requests")
    assert problem.detail == f"{name!r} names 2 requests: {', '.join(ids)}"
    assert refused(live, name, "forget", request_id=name, spans=[(5, 6)]).status == 409
    end(live, ids[0])
    assert f"{ids[0]} (finished)" in refused(live, name).detail
    assert live.call("forget", request_id=name, spans=[(5, 6)]).request_id == ids[1]


def test_many_candidates_are_counted(live: LiveEngine) -> None:
    ids = [f"{n}_chatcmpl-job-0a1b2c3d" for n in range(10)]
    admit(live, *ids)
    detail = refused(live, "job").detail
    assert detail.startswith("'job' names 10 requests: ")
    assert detail.endswith(f"{ids[7]}, 2 more")
