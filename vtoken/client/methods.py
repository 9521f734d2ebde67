"""Makes a method of a client out of a function that makes a call; knows signatures only."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

M = TypeVar("M", bound=Callable[..., Any])


def as_method(method: M, make: Callable[..., Any]) -> M:
    """`method` with the name, text and parameters of `make`, so that `help()` tells the truth."""
    functools.update_wrapper(method, make)
    signature = inspect.signature(make)
    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[receiver, *signature.parameters.values()],
        # Call[Status], Steps[Operation]: what is inside the brackets is what the method answers.
        return_annotation=str(signature.return_annotation).partition("[")[2][:-1],
    )
    return method
