"""The arguments of commands: what does not fit is refused by name, value and bound.

Knows neither the operations nor the engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from vtoken.errors import RefusedError


def check_fit(name: str, op: Callable[..., Any], args: dict[str, Any]) -> None:
    """Raises RefusedError when `op` does not take `args`."""
    try:
        inspect.signature(op).bind(**args)
    except TypeError as error:
        raise RefusedError(f"{name}: {error}", status=400, title="Bad command") from None


def text(name: str, value: Any) -> str:
    """`value`, which must be a string."""
    if not isinstance(value, str):
        raise RefusedError(
            f"{name} = {value!r} is not a string", field=name, value=value, bound="a string"
        )
    return value


def boolean(name: str, value: Any) -> bool:
    """`value`, which must be true or false."""
    if not isinstance(value, bool):
        raise RefusedError(
            f"{name} must be true or false", field=name, value=value, bound="boolean"
        )
    return value


def number(name: str, value: Any, *, low: float, high: float) -> float:
    """`value`, which must be a number in low..high; neither a boolean nor NaN is one."""
    fits = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not fits or not low <= value <= high:
        raise RefusedError(
            f"{name} = {value!r} is not a number in {low:g}..{high:g}",
            field=name,
            value=value,
            bound=f"{low:g}..{high:g}",
        )
    return float(value)


def integer(name: str, value: Any, *, low: int = 0, high: int = 2**53) -> int:
    """`value`, which must be an integer in low..high; a boolean is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RefusedError(
            f"{name} = {value!r} is not an integer in {low}..{high}",
            field=name,
            value=value,
            bound=f"{low}..{high}",
        )
    return value
