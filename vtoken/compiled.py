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
from typing import Any, overload

from llvmlite.binding import ffi
from numba import config, njit

# Where vLLM's CPU worker starts, it looks into `__dict__` of everything that any module holds. This
# object answers every name with a function of the LLVM library, which is no dictionary.
ffi.lib._fntab.setdefault("__dict__", {})

log = logging.getLogger("vtoken")
KERNELS: list[Any] = []  # all that were defined in this process


@overload
def kernel(function: Callable[..., Any]) -> Any: ...
@overload
def kernel(*, fastmath: set[str]) -> Callable[[Callable[..., Any]], Any]: ...
def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`function` compiled at its first call, or taken from the cache on disk.

    `fastmath`: what LLVM may do to floats beyond IEEE 754, by its own names. `contract` makes one
    rounding of a product and a sum, `reassoc` adds in any order, and so several at a time.
    """
    if function is None:
        return lambda f: _compiled(f, options)
    return _compiled(function, options)


def _compiled(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    try:
        compiled = njit(cache=True, **options)(function)
    except RuntimeError as error:  # Numba found no folder that it may write to
        _tell_uncached(str(error))
        compiled = njit(**options)(function)
    KERNELS.append(compiled)
    return compiled


def tell_compiled() -> str:
    """How many kernels this process has compiled, and how many it found on disk, in words."""
    if config.DISABLE_JIT:
        return f"{len(KERNELS)} kernels run as plain Python, as NUMBA_DISABLE_JIT says"
    made = sum(sum(kernel.stats.cache_misses.values()) for kernel in KERNELS)
    found = sum(sum(kernel.stats.cache_hits.values()) for kernel in KERNELS)
    uncached = sum(len(k.signatures) for k in KERNELS) - made - found
    return f"{made + uncached} kernels compiled, {found} taken from disk"


@cache
def _tell_uncached(why: str) -> None:
    log.warning("compiled kernels are not kept on disk, every start compiles them: %s", why)
