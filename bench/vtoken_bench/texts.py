"""Prompts: English for a trained model, random bytes for the demo model.

The English is the reference that comes with Python (`pydoc_data.topics`, 700 KB); nothing is
downloaded.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

from vtoken_bench.engines import prompt


def texts(model: Path | None, count: int, num_tokens: int) -> list[list[int]]:
    """`count` texts of `num_tokens` token ids each; `model` None is the demo model."""
    if model is None:
        rng = random.Random(0)
        return [prompt(rng, num_tokens) for _ in range(count)]
    ids = token_ids(model)
    if num_tokens > len(ids):
        raise ValueError(f"a prompt of {num_tokens} tokens is too long, the text has {len(ids)}")
    stride = (len(ids) - num_tokens) // max(1, count - 1)
    return [ids[i * stride : i * stride + num_tokens] for i in range(count)]


def english() -> str:
    """Python's own reference, topic after topic."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@cache
def token_ids(model: Path) -> list[int]:
    """The entire text as token ids of the model in the folder."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(english(), add_special_tokens=False).ids
    return ids
