"""Methods that both clients have: what is called once, is typed for either of them.

A function that makes a call, or a generator of calls, becomes a method with its name, its
parameters and its documentation. Of `Client` the method returns the answer, of `AsyncClient` it is
to be awaited. Which of them it is shows in how it is entered.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

from vtoken.client.call import Call, Steps

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Answering(Protocol[P, T_co]):
    """A method that returns a T."""

    @overload
    def __get__(
        self, client: AbstractContextManager[Any], owner: Any = None
    ) -> Callable[P, T_co]: ...
    @overload
    def __get__(
        self, client: AbstractAsyncContextManager[Any], owner: Any = None
    ) -> Callable[P, Coroutine[Any, Any, T_co]]: ...


def sent(make: Callable[P, Call[T]]) -> Answering[P, T]:
    """The method that sends a call."""
    return cast("Answering[P, T]", _method(make, "send"))


def run(make: Callable[P, Steps[T]]) -> Answering[P, T]:
    """The method that makes all calls of a sequence."""
    return cast("Answering[P, T]", _method(make, "run"))


def _method(make: Callable[..., Any], how: str) -> Any:
    """The method that gives what `make` returns to the client's method `how`."""

    @functools.wraps(make)
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, how)(make(*args, **kwargs))

    signature = inspect.signature(make)
    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[receiver, *signature.parameters.values()],
        # The method returns the type argument of Call[Status], Steps[Operation].
        return_annotation=str(signature.return_annotation).partition("[")[2][:-1],
    )
    return method
