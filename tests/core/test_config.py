"""Configuration: atomic merge patches, revisions, undo, and exact dry runs."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.core.harness import CoreEngine, LiveEngine, make_engine
from vtoken.base.errors import RefusedError
from vtoken.core.config.values import VTokenConfig, bounds, default_config, merge_patch
from vtoken.wire import PatchResult, Reply, config_changes
from vtoken.wire.commands import Command, PatchConfig

N, L, H = 64, 4, 8
BASE = merge_patch(
    default_config(N),
    {"policy": {"name": "h2o", "params": {"sinks": 2}}, "budget_tokens": 64},
    num_blocks=N,
    num_layers=L,
)
NAN, INF = float("nan"), float("inf")


def merged(patch: Any, config: VTokenConfig = BASE) -> VTokenConfig:
    return merge_patch(config, patch, num_blocks=N, num_layers=L, num_heads=H)


# ---------------------------------------------------------------- merge_patch

GOOD: dict[str, list[Any]] = {
    "policy": [{"name": "none"}, {"params": {"sinks": 3}}, {"name": "h2o", "params": {}}],
    "theta_f": [0, 1, 0.5, 0.0],
    "batch_size": [1, N],
    "low_watermark_blocks": [0, N],
    "headroom_blocks": [0, N // 2],
    "experiment": [{"planner": "pack"}, {"round_rule": "paper", "admission": "stock"}, {}],
    "reclamation": ["auto", "paused", "off"],
    "recycle": [True, False],
    "prefix_sharing": ["skip", "index", "copy"],
    "budget_tokens": [3, 1 << 24],
    "budget_ratio": [0.0, 0, 0.25, 1.0],
    "budget_floor_tokens": [1, 1 << 24],
    "interval_tokens": [0, 1 << 24],
    "protect": [{"template": False}, {"system": False, "last_user": True}, {}],
    "evict_during": ["decode", "prefill", "both"],
    "evict_when": ["pressure", "always"],
    "evict_after_wait_ms": [0, 2000, 3_600_000],
    "evict_per_token_left": [1, 8, 1 << 24],
    "park_bytes": [0, 1 << 46],
    "restore_after_ms": [0, 500, 3_600_000],
    "slo": ["", "ttft<2s", "ttft<2s, itl<80ms"],
    "verify_ratio": [0, 0.01, 1.0],
    "shadow": [None, {"name": "none"}, {"name": "tova"}, {"name": "h2o", "params": {"sinks": 3}}],
    "probe": [
        *({"layers": [3, 0]}, {"heads": [7, 0]}, {"every_steps": 1024}, {}),
        {"layers": [], "heads": [], "every_steps": 1},
    ],
    "canary": [{"share": 1}, {"share": 0.1, "control_share": 0}, {"control_share": 1.0}, {}],
}
_SINKS: list[Any] = [-1, 1.5, True, "1", {}, NAN]
_LAYERS: list[Any] = [[L], [-1], [True], [0.0], None, 0]
_HEADS: list[Any] = [[H], [0, -1], [False], ["0"], None, 0]
JUNK: list[Any] = [None, "x", [], [1], {"a": {"b": None}}, NAN, INF, -INF, -1, 1e300, "1", b"1"]
BAD: dict[str, list[Any]] = {
    "policy": ["h2o", ["h2o"], {"name": "lru"}, {"name": None}, {"nam": "h2o"}, {"params": None}]
    + [{"params": {"sinks": value}} for value in _SINKS]
    + [{"name": "streaming_llm", "params": {"recent": 1}}, {"params": {"x": 1}}],
    "theta_f": [-0.01, 1.01, True],
    "batch_size": [0, N + 1, 1.0, True],
    "low_watermark_blocks": [N + 1, 1.0, False],
    "headroom_blocks": [N // 2 + 1, 0.0, False],
    "experiment": [{"planner": "PACK"}, {"round_rule": None}, {"admission": 1}, {"copy": True}],
    "reclamation": ["on", "", 0, False],
    "recycle": [0, 1, "true"],
    "prefix_sharing": ["cow", "Index", "", 0, True],
    "budget_tokens": [0, 2, (1 << 24) + 1, 64.0, True],
    "budget_ratio": [-0.01, 1.01, True],
    "budget_floor_tokens": [0, (1 << 24) + 1, 64.0, True],
    "interval_tokens": [(1 << 24) + 1, 1.0, True],
    "protect": [{"template": value} for value in (1, None, "true")] + [{"user": True}, True],
    "evict_during": ["Decode", "never", 0],
    "evict_when": ["sometimes", "never", "", True],
    "evict_after_wait_ms": [-1, 3_600_001, 1.0, True],
    "evict_per_token_left": [0, (1 << 24) + 1, 1.0, True],
    "park_bytes": [-1, (1 << 46) + 1, 1.0, True, "4GiB", "auto"],
    "restore_after_ms": [-1, 3_600_001, 1.0, True],
    "slo": [None, 2, "ttft", "ttft<2"],
    "verify_ratio": [-0.01, 1.01, True],
    "shadow": ["h2o", {"name": "lru"}, {"name": None}, {"nam": "h2o"}, {"params": {"sinks": 2}}]
    + [{"name": "h2o", "params": {"sinks": value}} for value in _SINKS],
    "probe": [{"layers": value} for value in _LAYERS]
    + [{"heads": value} for value in _HEADS]
    + [{"every_steps": value} for value in (0, 1025, True, None)]
    + [{"steps": 1}],
    "canary": [
        {name: v} for name in ("share", "control_share") for v in (-0.1, 1.1, NAN, True, None)
    ]
    + [{"rate": 0.1}],
}
BAD_CASES = [
    (name, value)
    for name, values in BAD.items()
    for value in values
    + [j for j in JUNK if (name, j) not in (("probe", {}), ("shadow", None), ("canary", {}))]
]


def test_the_tables_name_every_field() -> None:
    assert set(GOOD) == set(BAD) == set(bounds(N, L))
    assert set(msgspec.to_builtins(BASE.values())) == set(GOOD)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in GOOD.items() for value in values]
)
def test_good_values_are_taken_and_touch_no_other_field(name: str, value: Any) -> None:
    after = merged({name: value})
    assert set(config_changes(BASE.values(), after.values())) <= {name}


@pytest.mark.parametrize(("name", "value"), BAD_CASES, ids=[f"{n}={v!r}" for n, v in BAD_CASES])
def test_a_bad_value_is_refused_by_name_next_to_any_other_field(name: str, value: Any) -> None:
    good = {"theta_f": 0.9} if name != "theta_f" else {"recycle": False}
    before = BASE.values()
    for patch in ({name: value}, good | {name: value}, {name: value} | good):
        with pytest.raises(RefusedError) as caught:
            merged(patch)
        assert (caught.value.field or "").split(".")[0] == name
        assert caught.value.bound
        assert caught.value.status == 422
    assert BASE.values() == before


@pytest.mark.parametrize("patch", [None, [], "theta_f", 1, True])
def test_a_patch_that_is_not_an_object_is_refused(patch: Any) -> None:
    with pytest.raises(RefusedError) as caught:
        merged(patch)
    assert caught.value.field == "body"


@pytest.mark.parametrize("name", ["theta", "", "policy.name", "THETA_F", "revision"])
def test_an_unknown_field_is_refused(name: str) -> None:
    with pytest.raises(RefusedError) as caught:
        merged({name: 1, "theta_f": 0.5})
    assert caught.value.field == name


@given(
    st.dictionaries(
        st.sampled_from([*GOOD, "other"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["name", "params", "layers", "x"]), inner)
            ),
            max_leaves=5,
        ),
    )
)
@settings(max_examples=300)
def test_any_json_gives_a_complete_configuration_or_a_refusal(patch: dict[str, Any]) -> None:
    try:
        after = merged(patch)
    except RefusedError:
        return
    assert merged(msgspec.to_builtins(after.values())).values() == after.values()


def test_a_policy_patch_of_the_same_name_merges_parameters_and_null_resets_one() -> None:
    kept = merged({"policy": {"params": {"recent_ratio": 0.25}}})
    assert kept.policy.params.sinks == 2
    assert kept.policy.params.recent_ratio == 0.25
    assert merged({"policy": {"params": {"sinks": None}}}, kept).policy.params.sinks == 4
    assert merged({"policy": {"name": "streaming_llm"}}).policy.params.sinks == 4


def test_a_budget_below_what_the_policy_needs_is_refused_from_either_side() -> None:
    for patch in ({"budget_tokens": 2}, {"policy": {"params": {"sinks": 64}}}):
        with pytest.raises(RefusedError) as caught:
            merged(patch)
        assert caught.value.field == "budget_tokens"


@pytest.mark.parametrize("num_blocks", [3, 4, 8, 64, 4096])
def test_the_default_configuration_lies_within_its_own_bounds(num_blocks: int) -> None:
    config = default_config(num_blocks)
    values = msgspec.to_builtins(config.values())
    again = merge_patch(config, values, num_blocks=num_blocks, num_layers=L)
    assert again.values() == config.values()


# ---------------------------------------------------------------- through the controller


def quiet(**options: Any) -> LiveEngine:
    """Not stepping by itself; some steps of traffic behind it."""
    engine = make_engine(**options)
    engine.steps(30)
    return engine


def problem(reply: Reply) -> Any:
    assert reply.problem is not None
    assert reply.value is None
    return reply.problem


def test_a_stale_if_match_is_refused_with_412_and_changes_nothing() -> None:
    with quiet() as engine:
        before = engine.call("config")
        reply = engine.ask("patch_config", patch={"theta_f": 0.5}, if_match=7)
        assert problem(reply).status == 412
        assert engine.call("config") == before
        done: PatchResult = engine.call("patch_config", patch={"theta_f": 0.5}, if_match=1)
        assert (done.revision, done.changes) == (2, {"theta_f": [0.25, 0.5]})
        assert done.applied_at_step == engine.core.runtime.step + 1


def test_a_command_past_its_callers_timeout_is_not_executed() -> None:
    with quiet() as engine:
        before = engine.call("config")
        patch = PatchConfig(patch={"theta_f": 0.5})
        late = Command(call=patch, expires_ts=time.time() - 0.01)
        assert problem(engine.handle(late)).title == "Too late"
        assert engine.call("config") == before
        in_time = Command(call=patch, expires_ts=time.time() + 60)
        assert engine.handle(in_time).problem is None


@pytest.mark.parametrize("if_match", ["1", 1.0, True, [], -1])
def test_an_if_match_that_is_not_a_revision_is_refused(if_match: Any) -> None:
    with quiet() as engine:
        reply = engine.ask("patch_config", patch={"theta_f": 0.5}, if_match=if_match)
        assert problem(reply).status == 422
        assert engine.call("config").revision == 1


def test_a_patch_that_changes_nothing_makes_no_revision_and_no_event() -> None:
    with quiet() as engine:
        seq = engine.core.runtime.events.last_seq
        done = engine.call("patch_config", patch={"theta_f": 0.25})
        assert (done.revision, done.changes) == (1, {})
        assert engine.core.runtime.events.last_seq == seq


def test_undo_is_a_new_revision_with_the_configuration_before() -> None:
    with quiet() as engine:
        first = engine.call("config").desired
        engine.call("patch_config", patch={"theta_f": 0.5})
        second = engine.call("config").desired
        engine.call("patch_config", patch={"experiment": {"planner": "pack"}, "batch_size": 3})
        assert engine.call("undo").desired == second
        undone = engine.call("undo", actor="ann")
        assert (undone.revision, undone.desired) == (5, first)
        assert problem(engine.ask("undo")).status == 409
        assert engine.call("config").revision == 5
        events = [e for e in engine.call("events", limit=10_000).events if e.kind == "config"]
        assert [e.data["revision"] for e in events] == [2, 3, 4, 5]
        assert events[-1].data["actor"] == "ann"


def state_of(engine: LiveEngine) -> Any:
    """All that an observer can see, times aside."""
    frame = engine.call("frame")
    frame.status.ts = 0.0
    frame.status.fragmentation.held_s = 0.0
    runtime = engine.core.runtime
    return (
        msgspec.to_builtins(frame),
        runtime.events.last_seq,
        msgspec.to_builtins(engine.call("events", limit=10_000)),
    )


def test_validate_only_changes_nothing() -> None:
    with quiet() as engine:
        before = state_of(engine)
        for patch in ({"budget_tokens": 16, "interval_tokens": 0}, {"reclamation": "off"}, {}):
            done = engine.call("patch_config", patch=patch, validate_only=True)
            assert done.what_if is not None
            assert (done.revision, done.applied_at_step) == (1, None)
            assert done.effective == done.desired == done.previous
            assert state_of(engine) == before


def test_what_if_answers_for_an_engine_without_requests() -> None:
    engine = CoreEngine(num_blocks=8)
    from vtoken.control.dry_runs import DryRuns

    answer = DryRuns(engine.runtime).what_if(engine.runtime.config)
    assert (answer.freed_blocks, answer.moved_tokens, answer.evicted_tokens) == (0, 0, 0)
