"""Check 6, short: native vLLM and vToken on one GPU, with Llama-3.1-8B's shape in one small pool.

    python -m vtoken_bench.serving_check [--tiny] [--variants NAME…] [--repeats N]

prints one JSON array, and each row also on stderr when its load ends. Two engines, stock vLLM and
vToken, with CUDA graphs; the loads of a repeat run one after another, forwards and backwards in
turn. Weights and prompts are random: times and memory are those of the shape, and the answers mean
nothing. `--tiny` runs the demo model on any device, for correctness only.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vtoken_bench.checks.measure import facts
from vtoken_bench.engines import Engine, prompt
from vtoken_bench.evaluation.answers import CONFIGS, FIXED
from vtoken_bench.evaluation.variants import NATIVE, configuration
from vtoken_bench.target import DEMO, LLAMA_8B, Target, add_arguments, model_folder, target

NOTHING, BY_ATTENTION = "vToken, nothing evicted", f"{FIXED}, h2o"
KEEP = {"budget_ratio": 0.5}  # of the prompt
PROFILED_STEPS = 30
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


def run(
    on: Target,
    model: str,
    load: Load,
    variants: Sequence[str] = tuple(VARIANTS),
    *,
    executor: str | None = None,
    profile: Path | None = None,
) -> dict[str, Any]:
    """One row a load, with all that was measured of it. Raises EngineError when an engine dies.

    `executor`: vLLM's `distributed_executor_backend`. `profile`: the folder for a trace of some
    steps of each load by torch's profiler, which slows them down.
    """
    size = on.stock_block_size
    blocks = load.num_blocks(size)
    args = on.engine_args(
        model_folder(model), block_size=size, max_model_len=load.longest + 1, num_blocks=blocks
    )
    args |= {"max_num_seqs": load.clients, "cudagraph_metrics": True}
    if executor is not None:
        args["distributed_executor_backend"] = executor
    if profile is not None:
        args["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": str(profile),
            "torch_profiler_with_stack": False,
        }
    settings = on.settings()
    configs = {"stock vLLM": None, "vToken": {"policy": {"name": "none"}}}
    used = {"stock vLLM" if VARIANTS[name] is None else "vToken" for name in variants}
    rows = []
    with ExitStack() as started, ThreadPoolExecutor() as pool:
        starts = {
            name: pool.submit(Engine, name, configs[name], args, settings=settings) for name in used
        }
        engines = {
            name: started.enter_context(closing(start.result())) for name, start in starts.items()
        }

        def figures(
            variant: str, asked: list[dict[str, Any]], clients: int, **others: Any
        ) -> dict[str, Any]:
            request: dict[str, Any] = {"requests": asked, "concurrency": clients}
            patch = VARIANTS[variant]
            if patch is None:
                return engines["stock vLLM"].ask(request | others)
            config = configuration(patch, blocks)
            return engines["vToken"].ask(request | others | {"config": config})

        for variant in variants:  # compiles kernels
            figures(variant, load.asked(load.repeats, 2), 2)
        for repeat in range(load.repeats):
            for variant in list(variants)[:: -1 if repeat % 2 else 1]:
                others = {}
                if profile is not None:
                    others["profile"] = {
                        "name": "".join(c if c.isalnum() else "-" for c in variant),
                        "after": load.new_tokens // 2,
                        "steps": PROFILED_STEPS,
                    }
                asked = load.asked(repeat, load.requests)
                found = figures(variant, asked, load.clients, **others)
                del found["endpoint"]  # a file of this machine
                rows.append({"variant": variant, "repeat": repeat} | found)
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return {
        "check": "serving",
        "model": model,
        "load": asdict(load),
        "blocks": blocks,
        "executor": executor,
        "rows": rows,
    }


def main(argv: list[str]) -> int:
    import torch

    parser = argparse.ArgumentParser(
        prog="python -m vtoken_bench.serving_check",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--tiny", action="store_true", help="the demo model, on any device")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--repeats", type=int, help="loads of each variant (default: 3; tiny: 1)")
    parser.add_argument("--executor", help="vLLM's --distributed-executor-backend, such as mp")
    parser.add_argument(
        "--profile",
        type=Path,
        help=f"{PROFILED_STEPS} steps of one load each in torch's profiler, into this folder",
    )
    args = parser.parse_args(argv)
    if args.repeats is not None and (args.repeats < 1 or args.profile):
        parser.error("--repeats: at least 1, and without --profile, which takes one")
    where = argparse.ArgumentParser()
    add_arguments(where)
    on = target(where.parse_args([]))  # the device of this machine, with its defaults
    if not args.tiny and on.device != "cuda":
        parser.error("torch sees no CUDA device; --tiny checks correctness only")
    load = TINY if args.tiny else Load()
    load = replace(load, repeats=1 if args.profile else args.repeats or load.repeats)
    model = DEMO if args.tiny else LLAMA_8B
    on = on if args.tiny else replace(on, dummy_weights=True)
    result = run(on, model, load, args.variants, executor=args.executor, profile=args.profile)
    print(json.dumps([result | {"facts": facts(torch.device(on.device))}], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
