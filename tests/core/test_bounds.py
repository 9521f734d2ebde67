"""Bounds come from annotations, and errors name field, value and bound."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from vtoken.base.errors import RefusedError
from vtoken.wire.bounds import MAX_DEPTH, bound_of, fault, read_json, takes


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    count: Annotated[int, Meta(ge=1, le=8, description="how many")]


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    inner: Annotated[Inner | None, Meta(description="what is inside")] = None
    ratio: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    mode: Literal["b", "a"] = "b"
    on: bool = False
    names: list[str] = []


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (bool, "true or false"),
        (str, "a string"),
        (Literal["b", "a"], "one of b, a"),
        (Annotated[int, Meta(ge=0, le=1 << 24)], "an integer in 0..16777216"),
        (Annotated[int, Meta(ge=1)] | None, "an integer in 1.."),
        (Annotated[float | None, Meta(le=0.5)], "a number in ..0.5"),
        (Annotated[int, Meta(ge=0, le=2**53)], "an integer in 0..9007199254740992"),
        (Literal[0, 1] | bool, "one of 0, 1"),
        (Inner, "an object"),
        (list[int], "a list"),
    ],
)
def test_a_bound_as_text(annotation: Any, expected: str) -> None:
    assert takes(bound_of(annotation)) == expected


@pytest.mark.parametrize(
    ("document", "field", "value", "bound"),
    [
        ({"inner": {"count": 9}}, "inner.count", 9, "1..8"),
        ({"inner": {"count": True}}, "inner.count", True, "1..8"),
        ({"inner": {}}, "inner.count", None, "fields: count"),
        ({"inner": {"count": 1, "x": 2}}, "inner.x", 2, "fields: count"),
        ({"inner": 3}, "inner", 3, "an object"),
        ({"ratio": -1}, "ratio", -1, "0..1"),
        ({"mode": "c"}, "mode", "c", "one of b, a"),
        ({"on": 1}, "on", 1, "true or false"),
        ({"names": ["a", 1]}, "names", ["a", 1], "a list"),
        ({"other": 1}, "other", 1, "fields: inner, ratio, mode, on, names"),
        ([], "body", [], "an object"),
    ],
)
def test_a_fault_names_field_value_and_bound(
    document: Any, field: str, value: Any, bound: str
) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(document, Outer)
    refused = fault(caught.value, document, Outer)
    assert (refused.field, refused.value, refused.bound) == (field, value, bound)
    assert refused.detail.startswith(field)


@pytest.mark.parametrize(
    ("text", "key"), [('{"a": 1, "b": 2, "a": 1}', "a"), ('[{"b": {"c": 1, "\\u0063": 2}}]', "c")]
)
def test_a_key_that_is_there_twice_is_refused(text: str, key: str) -> None:
    for document in (text, text.encode()):
        with pytest.raises(ValueError, match=f"the key '{key}' is there twice"):
            read_json(document)
    assert read_json('[{"a": 1}, {"a": 1}]') == [{"a": 1}, {"a": 1}]


def test_zero_has_no_sign() -> None:
    assert str(read_json('{"a": [-0.0, -1.5, -0]}')) == "{'a': [0.0, -1.5, 0]}"


def test_a_refusal_shows_the_ends_of_long_input() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(document := {"mode": "x" * 400_000}, Outer)
    refused = fault(caught.value, document, Outer)
    assert refused.detail.startswith("mode = 'xxx")
    assert refused.detail.endswith("xxx' is not one of b, a")
    assert str(refused.value).count("x") == 300
    assert len(refused.detail) < 1_010
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(document := {"y" * 400_000: 1}, Outer)
    refused = fault(caught.value, document, Outer)
    assert max(map(len, (refused.detail, str(refused.field)))) < 1_010
    value = RefusedError("", value=[1] * 100_000).value
    assert value.startswith("[1, 1, 1")
    assert value.endswith("1, 1, 1]")
    assert len(value) < 310


def test_json_nests_at_most_to_the_limit() -> None:
    read_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    for depth in (MAX_DEPTH + 1, 990, 100_000):
        with pytest.raises(ValueError, match="nests deeper than 64"):
            read_json("[" * depth + "]" * depth)
