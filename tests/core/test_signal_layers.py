"""The layers and heads of the policy's signal in the status; events of weights that may change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.support.core.harness import LiveEngine, make_engine
from vtoken.sentences import signal_text
from vtoken.wire import PolicyInfo, SignalLayers, Status


@pytest.fixture
def engine() -> Iterator[LiveEngine]:
    with make_engine(config={"policy": {"name": "h2o", "params": {}}}) as live:
        yield live


def reported(engine: LiveEngine) -> SignalLayers:
    status: Status = engine.call("status")
    assert status.calibration is not None
    return status.calibration


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "attention_sum from layer 2 (default depth)"),
        ({"policy": {"name": "keydiff"}}, "key_difference from layer 1 (default depth)"),
        ({"probe": {"layers": [1]}}, "attention_sum from layer 1 (configured)"),
        ({"probe": {"heads": [2]}}, "attention_sum from layer 2, head 2 (default depth)"),
        (
            {"probe": {"layers": [3, 0], "heads": [1, 2]}},
            "attention_sum from layers 0, 3, heads 1, 2 (configured)",
        ),
        ({"policy": {"name": "streaming_llm"}}, ""),
    ],
    ids=str,
)
def test_the_status_says_where_the_signal_comes_from(
    engine: LiveEngine, changes: dict[str, Any], text: str
) -> None:
    reported(engine)  # a change shows at once
    engine.configure(**changes)
    assert signal_text(reported(engine)) == text


def test_what_older_servers_measured_is_still_read() -> None:
    """Their profile chose layers, and their policies had a recall of needles."""
    old = (
        b'{"source":"profile","signal":"attention_sum","layers":[3],"heads":[1,2],"detail":"",'
        b'"file":"/cache/p.json","fingerprint":"0123456789abcdef","model":"a/b",'
        b'"created_ts":1700000000.0,"outdated_by":""}'
    )
    found = msgspec.json.decode(old, type=SignalLayers)
    assert signal_text(found) == "attention_sum from layer 3, heads 1, 2 (profile)"
    assert msgspec.json.encode(found) == old
    recalls = [{"keep": 0.5, "recall": 1.0, "samples": 24}]
    policy = {
        "name": "h2o",
        "summary": "",
        "source": "-",
        "needs": [],
        "params_schema": {},
        "quality": recalls,
    }
    assert msgspec.convert(policy, PolicyInfo).quality == recalls


def test_an_event_a_step_names_the_call_that_may_change_weights(engine: LiveEngine) -> None:
    controller = engine.controller
    controller.note_weights("start_weight_update", 0)
    engine.steps(1)
    for call in ("update_weights", "finish_weight_update"):  # while no step runs
        controller.note_weights(call, 0)
    events = engine.call("events", kind="weights").events
    assert [event.data for event in events] == [
        {"call": "start_weight_update", "dropped": 0},
        {"call": "update_weights", "dropped": 0},
    ]
    assert events[1].summary == "update_weights may have changed the weights"
