"""Turns a function that makes a call into a method of a client."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

M = TypeVar("M", bound=Callable[..., Any])


def as_method(method: M, make: Callable[..., Any]) -> M:
    """`method` with the name, docstring and parameters of `make`, for `help()`."""
    functools.update_wrapper(method, make)
    signature = inspect.signature(make)
    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[receiver, *signature.parameters.values()],
        # The method returns the type argument of Call[Status], Steps[Operation].
        return_annotation=str(signature.return_annotation).partition("[")[2][:-1],
    )
    return method
