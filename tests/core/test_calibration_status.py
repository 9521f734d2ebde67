"""The calibration profile in the status and in the list of policies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.core.harness import LiveEngine, make_engine
from tests.support.profiles import RECALL, made_up
from vtoken.core.config.calibration import default_layer
from vtoken.sentences import calibration_text
from vtoken.wire import Calibration, PolicyInfo, Recall, Status


@pytest.fixture
def engine() -> Iterator[LiveEngine]:
    with make_engine(config={"policy": {"name": "h2o", "params": {}}}) as live:
        yield live


def calibrate(engine: LiveEngine) -> None:
    profile = made_up(num_layers=engine.runtime.geometry.num_layers)
    engine.runtime.ranking.calibration = profile
    engine.facts.calibration_file, engine.facts.calibration_detail = "/cache/p.json", ""


def reported(engine: LiveEngine) -> Calibration:
    status: Status = engine.call("status")
    assert status.calibration is not None
    return status.calibration


def test_without_a_profile_signals_come_from_the_default_depth(engine: LiveEngine) -> None:
    engine.facts.calibration_detail = "none of this model"
    found = reported(engine)
    assert (found.source, found.signal) == ("default depth", "attention_sum")
    assert found.layers == [default_layer(engine.runtime.geometry.num_layers, "attention_sum")]
    assert (found.fingerprint, found.file, found.created_ts) == ("", "", None)
    assert found.detail == "none of this model"


def test_a_profile_provides_layers_and_heads(engine: LiveEngine) -> None:
    calibrate(engine)
    found = reported(engine)
    assert (found.source, found.layers, found.heads) == ("profile", [3], [1, 2])
    assert (found.file, found.fingerprint) == ("/cache/p.json", made_up().fingerprint)
    assert (found.model, found.created_ts) == ("made-up/model", made_up().created_ts)
    assert found.detail == ""


def test_settings_override_the_profile(engine: LiveEngine) -> None:
    calibrate(engine)
    engine.configure(probe={"layers": [1]})
    found = reported(engine)
    assert (found.source, found.layers, found.heads) == ("configured", [1], [])
    assert found.fingerprint == made_up().fingerprint


@pytest.mark.parametrize(
    ("policy", "kind"),
    [("knorm", "key_norm"), ("keydiff", "key_difference")],  # no layer beats chance; not measured
)
def test_a_kind_without_layers_in_the_profile_comes_from_the_default_depth(
    engine: LiveEngine, policy: str, kind: str
) -> None:
    calibrate(engine)
    engine.configure(policy={"name": policy, "params": {}})
    found = reported(engine)
    assert found.source == "default depth"
    assert found.layers == [default_layer(engine.runtime.geometry.num_layers, kind)]


def test_a_policy_without_a_signal_is_reported(engine: LiveEngine) -> None:
    calibrate(engine)
    engine.configure(policy={"name": "streaming_llm", "params": {}})
    found = reported(engine)
    assert (found.signal, found.layers) == (None, [])


def test_policies_show_the_quality_that_was_measured(engine: LiveEngine) -> None:
    def qualities() -> dict[str, list[Recall]]:
        offered: list[PolicyInfo] = engine.call("policies")
        assert engine.call("describe").policies == offered
        return {policy.name: policy.quality for policy in offered}

    assert not any(qualities().values())
    calibrate(engine)
    known = qualities()
    assert known.pop("h2o") == RECALL
    assert not any(known.values())


def test_a_profile_is_of_the_weights_before_a_change(engine: LiveEngine) -> None:
    """An event a step says so, with a profile or without."""
    controller = engine.controller
    controller.note_weights("start_weight_update", 0)
    assert reported(engine).outdated_by == ""  # no profile is loaded
    calibrate(engine)
    engine.steps(1)
    for call in ("update_weights", "finish_weight_update"):  # while no step runs
        controller.note_weights(call, 0)
    found = reported(engine)
    assert found.outdated_by == "finish_weight_update"
    assert calibration_text(found).endswith(
        "(/cache/p.json); finish_weight_update may have changed the weights since: calibrate again"
    )
    events = engine.call("events", kind="weights").events
    assert [event.data for event in events] == [
        {"call": "start_weight_update", "dropped": 0},
        {"call": "update_weights", "dropped": 0},
    ]
    assert events[1].summary == "update_weights may have changed the weights"
