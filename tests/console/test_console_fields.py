"""The settings form's model: rows from bounds and schemas, patches of just what changed."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.support.console_harness import make_busy
from vtoken import wire
from vtoken.policies import describe_policies
from vtoken.sentences import operation_text
from vtoken_console.changes.controls import applied_text
from vtoken_console.changes.fields import (
    GROUPS,
    POLICY,
    WORDS,
    Field,
    edited_values,
    make_fields,
    make_patch,
    parse_value,
    paths_of,
    show_value,
    step_value,
)
from vtoken_console.screens.control import what_if_paragraphs
from vtoken_console.style.units import change_text
from vtoken_console.widgets.outcome import problem_text

POLICIES = describe_policies()


@pytest.fixture
def document() -> wire.ConfigDocument:
    core = make_busy(100, 0)
    core.close()
    found: wire.ConfigDocument = core.controller.revisions.document()
    return found


@pytest.fixture
def fields(document: wire.ConfigDocument) -> list[Field]:
    return make_fields(document, POLICIES, "h2o")


def named(fields: list[Field], name: str) -> Field:
    return next(f for f in fields if f.path[-1] == name)


def test_every_bound_and_every_parameter_has_a_row(
    fields: list[Field], document: wire.ConfigDocument
) -> None:
    tops = {f.path[0] for f in fields}
    assert tops == set(document.bounds)
    params = {f.path[2] for f in fields if f.path[:2] == ("policy", "params")}
    assert params == {"recent_ratio", "sinks", "normalize", "pool", "pool_radius"}


def test_parameters_of_another_policy_start_from_its_defaults(
    document: wire.ConfigDocument,
) -> None:
    fields = make_fields(document, POLICIES, "streaming_llm")
    assert named(fields, "sinks").desired == 4


def test_every_setting_has_words_and_a_place_in_a_group(
    fields: list[Field], document: wire.ConfigDocument
) -> None:
    assert {f.path for f in fields} - {*WORDS} == {
        f.path for f in fields if f.path[:2] == ("policy", "params")
    }
    order = [*GROUPS]
    assert [order.index(f.group) for f in fields] == sorted(order.index(f.group) for f in fields)
    assert {f.name for f in fields} >= {"policy", "budget_ratio", "protect.system", "sinks"}
    assert {*wire.void_settings(document.desired)} <= {f.name for f in fields}


def test_a_setting_has_no_effect_by_the_edited_values(document: wire.ConfigDocument) -> None:
    values = structs.replace(document.desired, budget_ratio=0.5, evict_when="pressure")
    void = wire.void_settings(edited_values(values, {}))
    assert void["budget_tokens"] == "no effect: budget_ratio 0.5 decides the floor"
    void = wire.void_settings(edited_values(values, {"budget_ratio": 0.0}))
    assert "budget_tokens" not in void
    assert edited_values(values, {"budget_ratio": "0.x"}) == values
    canary = edited_values(values, {"canary": {"share": 0.1}}).canary
    assert canary == wire.Canary(share=0.1)


def test_a_proposed_patch_is_edits_that_make_the_same_patch(fields: list[Field]) -> None:
    patch = {"theta_f": 0.1, "canary": {"share": 0.5}, "policy": {"name": "none"}}
    assert make_patch(fields, paths_of(patch)) == patch


def test_probed_layers_are_shown_as_they_are_typed(document: wire.ConfigDocument) -> None:
    values = structs.replace(document.desired, probe=wire.Probe(layers=[3, 21]))
    fields = make_fields(structs.replace(document, desired=values), POLICIES, "h2o")
    layers = named(fields, "layers")
    assert (show_value(layers.desired), show_value(layers.effective)) == ("3,21", "")
    assert make_patch(fields, {layers.path: parse_value(layers, "3,21")}) == {}


def test_the_canarys_rows_are_those_of_its_struct(fields: list[Field]) -> None:
    rows = {field.path[1]: field for field in fields if field.path[0] == "canary"}
    assert list(rows) == list(wire.Canary.__struct_fields__)
    assert rows["share"].bound_text == "0..1"
    edits = {rows["share"].path: parse_value(rows["share"], "0.1")}
    assert make_patch(fields, edits) == {"canary": {"share": 0.1}}


def test_patch_holds_only_what_differs(fields: list[Field]) -> None:
    assert make_patch(fields, {}) == {}
    assert make_patch(fields, {("theta_f",): 0.25}) == {}
    edits = {("theta_f",): 0.1, ("policy", "params", "sinks"): 8}
    assert make_patch(fields, edits) == {
        "theta_f": 0.1,
        "policy": {"name": "h2o", "params": {"sinks": 8}},
    }
    assert make_patch(fields, {POLICY: "none"}) == {"policy": {"name": "none"}}


def test_unparsable_text_is_sent_as_typed(fields: list[Field]) -> None:
    assert parse_value(named(fields, "theta_f"), "0.5x") == "0.5x"
    assert parse_value(named(fields, "batch_size"), "1,024") == 1024
    assert parse_value(named(fields, "recycle"), "on") is True
    assert parse_value(named(fields, "recycle"), "maybe") == "maybe"


@pytest.mark.parametrize("name", ["theta_f", "batch_size", "sinks", "headroom_blocks"])
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("coarse", [False, True])
def test_steps_stay_inside_the_bounds_and_reach_them(
    fields: list[Field], name: str, by: int, coarse: bool
) -> None:
    field = named(fields, name)
    value = field.desired
    for _ in range(2000):
        value = step_value(field, value, by, coarse=coarse)
    assert value == (field.minimum if by < 0 else field.maximum)


def test_choices_go_round(fields: list[Field]) -> None:
    field = named(fields, "reclamation")
    seen, value = [], field.desired
    for _ in field.choices:
        seen.append(value)
        value = step_value(field, value, 1, coarse=False)
    assert sorted(seen) == sorted(field.choices)
    assert value == field.desired


@pytest.mark.parametrize("value", [0.25, 3, True, False, "pack", [1, 2]])
def test_shown_values_parse_back(value: object) -> None:
    kinds = {float: "float", int: "int", bool: "bool", str: "enum", list: "list"}
    field = Field(("x",), "g", "x", kinds[type(value)], "", value, value)
    assert parse_value(field, show_value(value)) == value


def test_a_problem_is_its_detail_which_names_value_and_bound() -> None:
    problem = wire.Problem(status=422, title="T", detail="theta_f = 2 is not in 0..1", value=2)
    assert problem_text(problem) == "theta_f = 2 is not in 0..1"
    assert problem_text(wire.Problem(status=502, title="Bad Gateway", detail="")) == (
        "502 Bad Gateway"
    )


def test_changes_read_as_old_to_new() -> None:
    assert change_text({"theta_f": [0.4, 0.25], "recycle": [True, False]}) == (
        "theta_f 0.4 → 0.25, recycle on → off"
    )


def test_failed_operation_has_its_reason() -> None:
    operation = wire.Operation(
        id="op-1",
        state="failed",
        actor="a",
        request_id="r1",
        batch_size=1,
        dry_run=False,
        created_ts=0.0,
        error="no headroom",
    )
    assert operation_text(operation) == "Compaction op-1 over request r1 is failed: no headroom"


def test_effect_of_a_change_on_scores_is_shown_before_and_after_it(
    document: wire.ConfigDocument,
) -> None:
    values = document.effective
    result = wire.PatchResult(
        revision=2,
        applied_at_step=7,
        previous=values,
        effective=values,
        changes={"theta_f": [0.1, 0.2]},
        notes=["scores carry over"],
    )
    assert applied_text(result).endswith("; scores carry over")
    assert "scores carry over" in [text for text, _ in what_if_paragraphs(result)]
