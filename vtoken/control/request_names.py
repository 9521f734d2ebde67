"""Requests by the id of their answer.

vLLM gives each engine request an id of its own: `chatcmpl-1`, the id of the answer, becomes
`chatcmpl-1-0a1b2c3d`; a completion of several prompts also numbers them, `cmpl-1-0-0a1b2c3d`, and
several samples of a prompt are `0_chatcmpl-1-0a1b2c3d` and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


def named(known: Iterable[str], request_id: str) -> list[str]:
    """`request_id` if it is `known`, else those of the answer `request_id`, each once."""
    known = dict.fromkeys(known)
    if request_id in known:
        return [request_id]
    engine_id = re.compile(rf"(\d+_)?{re.escape(request_id)}(-\d+)?-[0-9a-f]{{8}}")
    return [name for name in known if engine_id.fullmatch(name)]
