"""Memory of object graphs: all arrays, tensors and Python objects reachable from given roots.

Modules, classes and functions are not followed.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np

CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def deep_bytes(
    roots: Iterable[object], *, excluded: Iterable[object] = (), ends: Iterable[object] = ()
) -> int:
    """Bytes reachable from `roots` but not from `excluded`; each object counts once.

    Objects of `ends` neither count nor are followed.

    An array counts with its entire buffer, a view with the array that owns its buffer; a tensor
    with its storage, once for all of its views.
    """
    seen = set(map(id, ends))
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
        elif hasattr(found, "untyped_storage"):  # a tensor; this module does without torch
            storage = found.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        elif not isinstance(found, str | bytes | int | float):
            left += gc.get_referents(found)
    return total
