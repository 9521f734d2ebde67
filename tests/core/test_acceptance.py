"""Drafts that were accepted, by revision: status, advice, dry runs and guards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.core.harness import CoreEngine, LiveEngine, Request, make_engine
from vtoken.cli.show import status_parts
from vtoken.sentences import drafts_text
from vtoken.sentences.advice import advise
from vtoken.wire import DraftFigures, PatchResult, Status


def test_drafts_are_counted_under_the_revision_of_their_step() -> None:
    engine = CoreEngine(num_blocks=64, block_size=4, max_drafts=4)
    active, expected = engine.runtime.active, [DraftFigures(revision=n) for n in (3, 2, 1)]

    def draft(request: Request) -> tuple[int, int]:
        num = 1 + request.num_known % 4
        num_right = num // active.revision
        expected[-active.revision].proposed_tokens += num
        expected[-active.revision].accepted_tokens += num_right
        return num, num_right

    engine.draft = draft
    for name in ("a", "b"):
        engine.add(name, 8)
    for _ in range(3):
        for _ in range(4):
            engine.step()
        active.install(active.config)
    assert engine.runtime.drafts.document() == expected
    totals = engine.runtime.counters.serving
    assert totals.draft_tokens == sum(one.proposed_tokens for one in expected)
    assert totals.accepted_draft_tokens == sum(one.accepted_tokens for one in expected)


@pytest.fixture
def live() -> Iterator[LiveEngine]:
    with make_engine() as engine:
        engine.steps(1)
        yield engine


def verify(live: LiveEngine, num: int, num_accepted: int) -> None:
    """A step of the newest revision verifies `num` drafts."""
    live.steps(1)
    live.runtime.drafts.add(num, num - num_accepted)


def dry_run(live: LiveEngine, **patch: Any) -> PatchResult:
    result: PatchResult = live.call("patch_config", patch=patch, validate_only=True)
    return result


def advised(live: LiveEngine) -> list[str]:
    return [note.text for note in advise(live.call("status")) if note.code == "drafts"]


def test_without_drafts_nobody_mentions_them(live: LiveEngine) -> None:
    live.runtime.drafts.add(0, 0)  # vLLM fills some steps with drafts of no token
    status: Status = live.call("status")
    assert status.drafts == []
    for told in (status_parts(status), advised(live), dry_run(live, budget_ratio=0.2).notes):
        assert "draft" not in str(told)


@pytest.mark.parametrize(
    ("before", "since", "line", "note"),
    [
        (None, (95, 40), "40 of 95 accepted since revision 1", ""),
        (None, (1200, 732), "61% accepted since revision 1", ""),
        (
            None,
            (5000, 600),
            "12% accepted since revision 1",
            "12% of 5,000 drafts are accepted: draft fewer or none",
        ),
        ((1000, 740), (95, 0), "0 of 95 accepted since revision 2, 74% before", ""),
        ((999, 740), (1000, 610), "61% accepted since revision 2", ""),
        ((1000, 690), (1000, 610), "61% accepted since revision 2, 69% before", ""),
        (
            (1000, 740),
            (1000, 610),
            "61% accepted since revision 2, 74% before",
            "drafts: 61% accepted since revision 2, 74% before: slower, not wrong",
        ),
        (
            (1000, 740),
            (5000, 600),
            "12% accepted since revision 2, 74% before",
            "drafts: 12% accepted since revision 2, 74% before: slower, not wrong",
        ),
    ],
)
def test_acceptance_is_told_by_revision_with_enough_drafts(
    live: LiveEngine,
    before: tuple[int, int] | None,
    since: tuple[int, int],
    line: str,
    note: str,
) -> None:
    if before is not None:
        verify(live, *before)
        live.call("patch_config", patch={"theta_f": 0.5})
        assert advised(live) == []
    verify(live, *since)
    status: Status = live.call("status")
    assert drafts_text(status.drafts) == line
    assert str(("drafts", line)) in str(status_parts(status))
    assert advised(live) == [note] * bool(note)
    assert dry_run(live, theta_f=0.6).notes == []
    (told,) = [text for text in dry_run(live, budget_ratio=0.2).notes if "draft" in text]
    assert told == f"drafts: {line}; a lower share is slower, not wrong"
    live.call("patch_config", patch={"theta_f": 0.6})
    live.steps(1)
    assert advised(live) == []  # the newest revision has none yet


def test_a_guard_on_acceptance_is_of_the_drafts_since_the_change(live: LiveEngine) -> None:
    verify(live, 1000, 500)
    guard = {"metric": "draft_acceptance_ratio", "below": 0.6}
    result = live.call("patch_config", patch={"theta_f": 0.5}, guards=[guard], guard_for_s=600)
    assert result.notes == ["drafts accepted is 0.5 before the change, below the guard of 0.6"]
    for num, num_accepted, values in ((999, 699, [None]), (1, 1, [0.7]), (1000, 0, [])):
        verify(live, num, num_accepted)
        live.steps(1)
        assert [guard.value for guard in live.call("status").guards] == values
    assert live.runtime.config.theta_f == 0.25
    reason = live.call("events", kind="config").events[-1].data["reason"]
    assert reason == "drafts accepted 0.35 < 0.6"
