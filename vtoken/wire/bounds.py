"""The values that a struct's field takes, from its annotation: as `Bound`, text and refusal.

The declaration of a field is the only place for its type, bounds and choices. Everything here is
derived from msgspec's annotations and errors.
"""

from __future__ import annotations

import json
import re
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta, structs

from vtoken.base.errors import RefusedError
from vtoken.wire import Bound

NOUNS = {"int": "an integer", "float": "a number", "str": "a string", "list": "a list"}
MAX_DEPTH = 64  # of a JSON document from a client
TOO_DEEP = f"it nests deeper than {MAX_DEPTH} levels"
_AT = re.compile(r" - at `\$\.?(.*)`$")


def read_json(text: str | bytes) -> Any:
    """The document in `text`; raises ValueError if it is not JSON, nests too deep, or has a key
    twice in an object.

    Later uses of the document (repr, encoding) recurse too, so the limit is far below Python's.
    """
    try:
        document = _checked(msgspec.json.decode(text), MAX_DEPTH)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    json.loads(text, object_pairs_hook=_check_keys, parse_int=float)
    return document


def _checked(document: Any, levels: int) -> Any:
    """The document with -0.0 as 0.0; raises ValueError if it nests too deep."""
    if isinstance(document, float):
        return document + 0.0
    if not isinstance(document, (dict, list)):
        return document
    if levels == 0:
        raise ValueError(TOO_DEEP)
    if isinstance(document, dict):
        return {key: _checked(part, levels - 1) for key, part in document.items()}
    return [_checked(part, levels - 1) for part in document]


def _check_keys(pairs: list[tuple[str, Any]]) -> None:
    """Raises ValueError if an object has a key twice."""
    keys = set()
    for key, _ in pairs:
        if key in keys:
            raise ValueError(f"the key {key!r} is there twice")
        keys.add(key)


def bounds_of(kind: type[msgspec.Struct]) -> dict[str, Bound]:
    """Field -> its bound, in the order of the struct."""
    return {field.encode_name: bound_of(field.type) for field in structs.fields(kind)}


def bound_of(annotation: Any) -> Bound:
    """The bound of a field; that an optional one also takes null is not part of it."""
    kind, notes = _bare(annotation)
    bound = Bound(type="object", summary="")
    for note in notes:
        bound.minimum = note.ge if note.ge is not None else bound.minimum
        bound.maximum = note.le if note.le is not None else bound.maximum
        bound.summary = bound.summary or note.description or ""
    origin = get_origin(kind)
    if origin is Literal:
        bound.type, bound.choices = "enum", [str(choice) for choice in get_args(kind)]
    elif origin in (list, tuple):
        bound.type = "list"
    elif kind in (bool, int, float, str):
        bound.type = kind.__name__
    return bound


def _bare(annotation: Any) -> tuple[Any, list[Meta]]:
    """The type in an annotation, without null, and its `Meta`, outermost first."""
    kind, notes = annotation, []
    while (origin := get_origin(kind)) in (Annotated, Union, UnionType):
        inner = get_args(kind)
        if origin is Annotated:
            notes += [note for note in inner if isinstance(note, Meta)]
            kind = inner[0]
        else:
            kind = next(part for part in inner if part is not NoneType)
    return kind, notes


def takes(bound: Bound) -> str:
    """`an integer in 1..64`, `one of plug, pack`."""
    if bound.type == "bool":
        return "true or false"
    if bound.type == "enum":
        return "one of " + ", ".join(bound.choices or [])
    noun = NOUNS.get(bound.type, "an object")
    limits = span(bound)
    return f"{noun} in {limits}" if limits else noun


def span(bound: Bound) -> str:
    """`1..64`; a side without a bound is empty, and so is the text without any."""
    if bound.minimum is None and bound.maximum is None:
        return ""
    return f"{_number(bound.minimum)}..{_number(bound.maximum)}"


def _number(limit: float | None) -> str:
    if limit is None:
        return ""
    return str(int(limit)) if limit == int(limit) else f"{limit:.15g}"


def refuse(field: str, value: Any, bound: Bound) -> RefusedError:
    """The error for a `value` outside `bound`."""
    expected = takes(bound)
    return RefusedError(
        f"{field} = {value!r} is not {expected}",
        field=field,
        value=value,
        bound=span(bound) or expected,
    )


def check(field: str, value: float, bound: Bound) -> None:
    """Raises RefusedError for a number outside `bound`."""
    low, high = bound.minimum, bound.maximum
    if (low is not None and value < low) or (high is not None and value > high):
        raise refuse(field, value, bound)


def fault(
    error: msgspec.ValidationError, document: Any, kind: type[msgspec.Struct]
) -> RefusedError:
    """The refusal for msgspec's `error` in reading `document` as a `kind`.

    It names the field's path, its value in the document, and the bound of its annotation.
    """
    message = str(error)
    at = _AT.search(message)
    names = [name.partition("[")[0] for name in at[1].split(".") if name] if at else []
    value, annotation = document, kind
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
        annotation = fields_of(annotation).get(name, Any)
    missing = re.search(r"(missing required|unknown) field `(.*?)`(?: - at|$)", message)
    if missing is None:
        return refuse(".".join(names) or "body", value, bound_of(annotation))
    field = ".".join([*names, missing[2]])
    return RefusedError(
        f"{field} is missing" if missing[1] != "unknown" else f"{field} is not a known field",
        field=field,
        value=value.get(missing[2]) if isinstance(value, dict) else None,
        bound="fields: " + ", ".join(fields_of(annotation)),
    )


def fields_of(annotation: Any) -> dict[str, Any]:
    """Field -> annotation of the struct in `annotation`; empty if that is not a struct."""
    kind, _ = _bare(annotation)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {field.encode_name: field.type for field in structs.fields(kind)}
    return {}
