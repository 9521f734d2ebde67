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


def passages(model: Path, count: int, num_tokens: int) -> list[tuple[str, list[int]]]:
    """`count` pieces of the English, each with its `num_tokens` token ids.

    Encoding a piece alone gives the same ids; the tokenizer's BOS is one of them.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = english()
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    length = num_tokens - len(tokenizer.encode("").ids)
    stride = (len(offsets) - length) // count
    if length < 1 or stride < 1:
        raise ValueError(
            f"{count} prompts of {num_tokens} tokens do not fit, the text has {len(offsets)}"
        )
    found = []
    for i in range(count):
        for start in range(i * stride, (i + 1) * stride):
            piece = text[offsets[start][0] : offsets[start + length - 1][1]]
            ids: list[int] = tokenizer.encode(piece).ids
            if len(ids) == num_tokens:  # a piece may tokenize differently at its start
                found.append((piece, ids))
                break
        else:
            raise ValueError(f"no piece of the text has exactly {num_tokens} tokens")
    return found


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
