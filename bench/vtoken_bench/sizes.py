"""Memory of object graphs: every array and Python object that is reachable from given roots.

Modules, classes and functions are not followed.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np

CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def deep_bytes(roots: Iterable[object], *, excluded: Iterable[object] = ()) -> int:
    """Bytes reachable from `roots` but not from `excluded`; each object counts once.

    An array counts with its entire buffer, a view with the array that owns its buffer.
    """
    seen: set[int] = set()
    _walk(excluded, seen)
    return _walk(roots, seen)


def _walk(roots: Iterable[object], seen: set[int]) -> int:
    total, left = 0, list(roots)
    while left:
        found = left.pop()
        if id(found) in seen or isinstance(found, CODE):
            continue
        seen.add(id(found))
        total += sys.getsizeof(found)  # includes the buffer that an array owns
        if isinstance(found, np.ndarray):
            if found.base is not None:
                left.append(found.base)
        elif not isinstance(found, str | bytes | int | float):
            left += gc.get_referents(found)
    return total
