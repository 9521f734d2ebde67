"""Kernels: plain loops over arrays, compiled by Numba.

A kernel takes and returns numpy arrays and numbers only, so the same source runs as plain Python
under `NUMBA_DISABLE_JIT=1`, for a debugger, for coverage, and in tests. Compiled code is kept on
disk, beside its source or in the user's cache folder; `NUMBA_CACHE_DIR` names another one. Without
a folder that can be written to, kernels are compiled anew in every process, and a line in the log
says so.

Rules for a kernel: no Python objects, no allocation that grows with the number of calls, and arrays
of one type everywhere, because every new combination of types is compiled again. A kernel calls
kernels of its own file only: Numba compiles a callee into its caller, and looks only at the
caller's file to see whether the code that it kept is still good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast, overload

from llvmlite.binding import ffi
from numba import njit

# Where vLLM's CPU worker starts, it looks into `__dict__` of everything that any module holds. This
# object answers every name with a function of the LLVM library, which is no dictionary.
ffi.lib._fntab.setdefault("__dict__", {})

log = logging.getLogger("vtoken")
F = TypeVar("F", bound=Callable[..., Any])


@overload
def kernel(function: F) -> F: ...
@overload
def kernel(*, fastmath: set[str]) -> Callable[[F], F]: ...
def kernel(function: F | None = None, **options: Any) -> F | Callable[[F], F]:
    """`function` compiled at its first call, or taken from the cache on disk.

    `fastmath`: what LLVM may do to floats beyond IEEE 754, by its own names. `contract` makes one
    rounding of a product and a sum, `reassoc` adds in any order, and so several at a time.
    """
    if function is None:
        return lambda f: _compiled(f, options)
    return _compiled(function, options)


def _compiled(function: F, options: dict[str, Any]) -> F:
    try:
        return cast(F, njit(cache=True, **options)(function))
    except RuntimeError as error:  # Numba found no folder that it may write to
        _tell_uncached(str(error))
        return cast(F, njit(**options)(function))


@cache
def _tell_uncached(why: str) -> None:
    log.warning("compiled kernels are not kept on disk, every start compiles them: %s", why)
