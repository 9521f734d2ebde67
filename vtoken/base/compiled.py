"""Kernels: plain loops over arrays, compiled by Numba.

A kernel takes and returns numpy arrays and numbers only, so the same source runs as plain Python
under `NUMBA_DISABLE_JIT=1`, for a debugger, for coverage, and in tests. Numba caches compiled code
on disk, next to the source or in the user's cache folder; `NUMBA_CACHE_DIR` overrides the location.
Without a writable folder every process compiles all kernels again and logs a warning.

Rules for a kernel: no Python objects, no allocation that grows with the number of calls, and one
array type per argument, because Numba compiles every new combination of types. A kernel calls only
kernels of its own file: Numba inlines callees and checks only the caller's file for staleness.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, overload

from llvmlite.binding import ffi
from numba import config, njit

# vLLM's CPU worker reads `__dict__` of every module-level object at start-up. This object resolves
# every attribute to a function of the LLVM library, `__dict__` included.
ffi.lib._fntab.setdefault("__dict__", {})

log = logging.getLogger("vtoken")
KERNELS: list[Any] = []  # every kernel defined in this process


@overload
def kernel(function: Callable[..., Any]) -> Any: ...
@overload
def kernel(*, fastmath: set[str]) -> Callable[[Callable[..., Any]], Any]: ...
def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile `function` at its first call, or load it from the cache on disk.

    `fastmath`: LLVM's fast-math flags. `contract` fuses multiply and add into one rounding;
    `reassoc` lets sums be reordered and vectorised.
    """
    if function is None:
        return lambda f: _compiled(f, options)
    return _compiled(function, options)


def _compiled(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    try:
        compiled = njit(cache=True, **options)(function)
    except RuntimeError as error:  # Numba found no writable cache folder
        _warn_uncached(str(error))
        compiled = njit(**options)(function)
    KERNELS.append(compiled)
    return compiled


def describe_kernels() -> str:
    """One line: how many kernels this process compiled and how many it loaded from disk."""
    if config.DISABLE_JIT:
        return f"{len(KERNELS)} kernels run as plain Python (NUMBA_DISABLE_JIT is set)"
    made = sum(sum(kernel.stats.cache_misses.values()) for kernel in KERNELS)
    found = sum(sum(kernel.stats.cache_hits.values()) for kernel in KERNELS)
    uncached = sum(len(k.signatures) for k in KERNELS) - made - found
    return f"{made + uncached} kernels compiled, {found} taken from disk"


@cache
def _warn_uncached(why: str) -> None:
    log.warning("kernels cannot be cached on disk, so every start compiles them again: %s", why)
