"""Examples of every answer, body and message, from `examples.json`.

tests/examples/make.py records the file from a real server. It is read when a description is first
requested.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from vtoken_api.problems import PROBLEM_JSON

JSON = "application/json"


class Examples(msgspec.Struct):
    """By operation id, message tag and HTTP status."""

    answers: dict[str, Any]
    bodies: dict[str, Any]
    messages: dict[str, Any]
    problems: dict[str, Any]


@cache
def examples() -> Examples:
    """The examples in `examples.json`."""
    return msgspec.json.decode(
        files("vtoken_api.rest").joinpath("examples.json").read_bytes(), type=Examples
    )


def add_to(paths: dict[str, Any]) -> None:
    """Add the examples to the `paths` of an OpenAPI document."""
    known = examples()
    for operations in paths.values():
        for operation in operations.values():
            name = operation["operationId"]
            for content in operation.get("requestBody", {}).get("content", {}).values():
                if name in known.bodies:
                    content["example"] = known.bodies[name]
            for status, answer in operation["responses"].items():
                content = answer.get("content", {})
                if status.startswith("2") and JSON in content and name in known.answers:
                    content[JSON]["example"] = known.answers[name]
                elif PROBLEM_JSON in content:
                    content[PROBLEM_JSON]["example"] = known.problems[status]
