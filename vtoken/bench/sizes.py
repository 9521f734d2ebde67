"""How many bytes objects really take: every array and Python object that can be reached from them.

Knows no class of vToken. Modules, classes and functions are not followed, and neither is what the
caller says belongs to somebody else.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np

CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def deep_bytes(roots: Iterable[object], *, of_others: Iterable[object] = ()) -> int:
    """Bytes of everything that `roots` reach and `of_others` do not; each object counts once.

    An array counts with its whole capacity, a view with the array that owns its numbers.
    """
    seen: set[int] = set()
    _walk(of_others, seen)
    return _walk(roots, seen)


def _walk(roots: Iterable[object], seen: set[int]) -> int:
    total, left = 0, list(roots)
    while left:
        found = left.pop()
        if id(found) in seen or isinstance(found, CODE):
            continue
        seen.add(id(found))
        total += sys.getsizeof(found)  # of an array with the numbers that it owns
        if isinstance(found, np.ndarray):
            if found.base is not None:
                left.append(found.base)
        elif not isinstance(found, str | bytes | int | float):
            left += gc.get_referents(found)
    return total
