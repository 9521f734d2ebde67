"""Examples of what is answered, sent and accepted, for both API descriptions.

`make tables` records `examples.json` from a real server. It is read when a description is first
requested.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import msgspec


@cache
def examples() -> dict[str, Any]:
    """One example a struct, by the struct's name."""
    return msgspec.json.decode(
        files("vtoken_api.rest").joinpath("examples.json").read_bytes(), type=dict[str, Any]
    )
