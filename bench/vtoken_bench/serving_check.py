"""Check 6, short: native vLLM and vToken on one GPU, with Llama-3.1-8B's shape in one small pool.

    python -m vtoken_bench.serving_check [--tiny]

prints one JSON array. Two engines, stock vLLM and vToken, with CUDA graphs; the loads of a repeat
run one after another, forwards and backwards in turn. Weights and prompts are random: times and
memory are those of the shape, and the answers mean nothing. `--tiny` runs the demo model on any
device, for correctness only.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from typing import Any

from vtoken_bench.checks.measure import facts
from vtoken_bench.engines import Engine, prompt
from vtoken_bench.evaluation.answers import CONFIGS, FIXED
from vtoken_bench.evaluation.variants import NATIVE, configuration
from vtoken_bench.target import DEMO, LLAMA_8B, Target, add_arguments, model_folder, target

NOTHING, BY_ATTENTION = "vToken, nothing evicted", f"{FIXED}, h2o"
KEEP = {"budget_ratio": 0.5}  # of the prompt
VARIANTS: dict[str, dict[str, Any] | None] = {
    NATIVE: None,
    NOTHING: {"policy": {"name": "none"}},
    **{name: config | KEEP for name, config in CONFIGS.items()},
    BY_ATTENTION: CONFIGS[FIXED] | KEEP | {"policy": {"name": "h2o"}},
}


@dataclass(frozen=True, slots=True)
class Load:
    """`pool`: blocks, as a share of what the clients' requests need at their end."""

    clients: int = 32
    requests: int = 64
    prompt_tokens: int = 1024
    new_tokens: int = 384
    pool: float = 0.45
    repeats: int = 3

    def num_blocks(self, block_size: int) -> int:
        return round(self.pool * self.clients * -(-self.longest // block_size))

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.new_tokens

    def asked(self, seed: int, count: int) -> list[dict[str, Any]]:
        """`count` requests with random prompts of printable bytes."""
        rng = random.Random(seed)
        return [
            {"prompt": prompt(rng, self.prompt_tokens), "num_new": self.new_tokens}
            for _ in range(count)
        ]


TINY = Load(clients=4, requests=6, prompt_tokens=100, new_tokens=40, repeats=1)


def run(on: Target, model: str, load: Load) -> dict[str, Any]:
    """One row a load, with all that was measured of it. Raises EngineError when an engine dies."""
    size = on.stock_block_size
    blocks = load.num_blocks(size)
    args = on.engine_args(
        model_folder(model), block_size=size, max_model_len=load.longest + 1, num_blocks=blocks
    )
    args |= {"max_num_seqs": load.clients, "cudagraph_metrics": True}
    settings = on.settings() | {"calibration": "off"}  # not this user's profile
    configs = {"stock vLLM": None, "vToken": {"policy": {"name": "none"}}}
    rows = []
    with ExitStack() as started, ThreadPoolExecutor() as pool:
        starts = [
            pool.submit(Engine, name, config, args, settings=settings)
            for name, config in configs.items()
        ]
        stock, vtoken = (started.enter_context(closing(start.result())) for start in starts)

        def figures(variant: str, asked: list[dict[str, Any]], clients: int) -> dict[str, Any]:
            request: dict[str, Any] = {"requests": asked, "concurrency": clients, "sample_every": 8}
            patch = VARIANTS[variant]
            if patch is None:
                return stock.ask(request)
            return vtoken.ask(request | {"config": configuration(patch, blocks)})

        for variant in VARIANTS:  # compiles kernels
            figures(variant, load.asked(load.repeats, 2), 2)
        for repeat in range(load.repeats):
            for variant in list(VARIANTS)[:: -1 if repeat % 2 else 1]:
                found = figures(variant, load.asked(repeat, load.requests), load.clients)
                del found["endpoint"]  # a file of this machine
                rows.append({"variant": variant, "repeat": repeat} | found)
    return {
        "check": "serving",
        "model": model,
        "load": asdict(load),
        "blocks": blocks,
        "rows": rows,
    }


def main(argv: list[str]) -> int:
    import torch

    parser = argparse.ArgumentParser(
        prog="python -m vtoken_bench.serving_check",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--tiny", action="store_true", help="the demo model, on any device")
    args = parser.parse_args(argv)
    where = argparse.ArgumentParser()
    add_arguments(where)
    on = target(where.parse_args([]))  # the device of this machine, with its defaults
    if args.tiny:
        result = run(on, DEMO, TINY)
    elif on.device == "cuda":
        result = run(replace(on, dummy_weights=True), LLAMA_8B, Load())
    else:
        parser.error("torch sees no CUDA device; --tiny checks correctness only")
    print(json.dumps([result | {"facts": facts(torch.device(on.device))}], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
