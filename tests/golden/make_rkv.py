"""Makes `rkv.npz`: the scores of R-KV's published scorer for one random cache.

Its package cannot be imported as it is published, so the two files of the scorer are loaded from a
checkout of github.com/Zefan-Cai/R-KV. They need torch alone:

    git clone https://github.com/Zefan-Cai/R-KV && git -C R-KV checkout d15c976
    uv venv rkv-env --python 3.11 && uv pip install --python rkv-env torch numpy
    rkv-env/bin/python tests/golden/make_rkv.py R-KV

Made with torch 2.13.0, numpy 2.3.5. For each head the file holds the redundancy [n] of the keys
and, for some budgets, the indices of the tokens that it keeps. The window's keys receive no
attention here: the scorer omits them from its softmax, vToken's softmax is over all live tokens.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

TOKENS, HEADS, HEAD_SIZE, WINDOW, BUDGETS = 48, 2, 8, 8, (16, 24, 36)
MIX_LAMBDAS = (0.07, 0.1, 0.5)


def load(name: str, path: Path) -> ModuleType:
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(checkout: Path) -> None:
    utils = load("published_utils", checkout / "rkv" / "utils.py")
    package = ModuleType("published")
    package.__dict__.update(
        cal_similarity=utils.cal_similarity,
        compute_attention_scores=utils.compute_attention_scores,
    )
    sys.modules["published"] = package
    scorer = load("published.r1_kv", checkout / "rkv" / "compression" / "r1_kv.py").R1KV

    torch.manual_seed(7)
    keys = torch.randn(1, HEADS, TOKENS, HEAD_SIZE)
    queries = 0.5 * torch.randn(1, HEADS, WINDOW, HEAD_SIZE)
    keys[..., 0], queries[..., 0] = 0.0, 8.0
    keys[:, :, -WINDOW:, 0] = -20.0
    for first, second, third in ((3, 11, 30), (5, 6, 7)):  # similar keys
        for copy in (second, third):
            keys[:, :, copy] = keys[:, :, first] + 0.1 * torch.randn(HEADS, HEAD_SIZE)
    places = torch.arange(TOKENS).float()[None, None, :, None].expand_as(keys)
    kept = {}
    for budget in BUDGETS:
        for mix_lambda in MIX_LAMBDAS:
            press = scorer(budget=budget, window_size=WINDOW, mix_lambda=mix_lambda)
            _, values = press.update_kv(keys, queries, places)
            kept[f"kept_{budget}_{mix_lambda}"] = values[0, :, :, 0].long().sort().values.numpy()
    np.savez_compressed(
        Path(__file__).with_name("rkv.npz"),
        keys=keys[0].numpy(),
        queries=queries[0].numpy(),
        redundancy=utils.cal_similarity(keys).numpy(),
        **kept,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
