"""Makes `kvpress.npz`: the scores of published scorers for one random cache.

Run in an environment of its own, since kvpress pins an older transformers than vLLM:

    uv venv kvpress-env --python 3.11
    uv pip install --python kvpress-env kvpress==0.5.5 transformers==5.2.0 \\
        --overrides overrides-cpu.txt
    kvpress-env/bin/python tests/golden/make.py

Made with kvpress 0.5.5, transformers 5.2.0, torch 2.13.0, numpy 2.4.6. The file
holds each scorer's scores [n] as a mean over KV heads, which ranks tokens if all heads keep the
same ones.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from kvpress import (
    KeyDiffPress,
    KnormPress,
    ObservedAttentionPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)

TOKENS, KV_HEADS, QUERY_HEADS, HEAD_SIZE, WINDOW, PRUNED_RATIO = 48, 2, 4, 8, 12, 0.5


def main() -> None:
    torch.manual_seed(5)
    keys = torch.randn(1, KV_HEADS, TOKENS, HEAD_SIZE)
    logits = 2 * torch.randn(1, QUERY_HEADS, TOKENS, TOKENS)
    logits = logits.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), float("-inf"))
    attention = torch.softmax(logits, dim=-1)
    config = SimpleNamespace(num_attention_heads=QUERY_HEADS, num_key_value_heads=KV_HEADS)
    module = SimpleNamespace(config=config, head_dim=HEAD_SIZE)
    hidden = torch.zeros(1, TOKENS, 1)
    presses: dict[str, Any] = {
        "streaming_llm": StreamingLLMPress(compression_ratio=PRUNED_RATIO, n_sink=4),
        "h2o": ObservedAttentionPress(),
        "tova": TOVAPress(),
        "snapkv": SnapKVPress(window_size=WINDOW, kernel_size=5),
        "knorm": KnormPress(),
        "keydiff": KeyDiffPress(),
    }
    scores = {
        name: press.score(module, hidden, keys, keys, attention, {})[0].mean(dim=0).numpy()
        for name, press in presses.items()
    }
    np.savez_compressed(
        Path(__file__).with_name("kvpress.npz"),
        keys=keys[0].numpy(),
        attention=attention[0].numpy(),
        **scores,
    )


if __name__ == "__main__":
    main()
