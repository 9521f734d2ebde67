"""What every document is made of: the base of the structs, and packed arrays."""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA_VERSION = 1

PackedArray = bytes | list[int]


class Doc(msgspec.Struct, omit_defaults=False, kw_only=True):
    """Base of every wire document. Readers ignore unknown fields, so old readers keep working."""


class OfEngine(Doc):
    """A document about one of a server's engines.

    `engine` is vLLM's data-parallel rank. The API process that asks the engine fills it in, so it
    is None in documents that the engine itself publishes, of an older server, and in an answer
    about all engines of a server that has several.
    """

    engine: int | None = None


def pack_array(values: Any, *, packed: bool) -> PackedArray:
    """A numpy array as bytes (`packed`, for msgpack) or as a list of integers (for JSON)."""
    out: PackedArray = values.tobytes() if packed else values.tolist()
    return out


def unpack_array(values: PackedArray, dtype: str) -> Any:
    """The numpy array packed by `pack_array`; `dtype` is "u1", "<u2" or "<u4"."""
    import numpy as np

    if isinstance(values, list):
        return np.asarray(values, dtype=dtype)
    return np.frombuffer(values, dtype=dtype)
