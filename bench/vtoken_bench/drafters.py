"""`vtoken bench drafters`: a draft model beside eviction, at half the memory.

Four engines on one load: stock vLLM without drafts and with a draft model, in ample memory, and
vToken with that draft model, in ample memory and in a pool of half of what the requests hold at
their ends, where requests evict. The draft model is the first layers of the target, made in a
temporary folder: what it accepts says nothing about a trained one. Every run has a fresh engine
process; variants are interleaved, forwards and backwards in turn. The clock runs during steps only,
see `vtoken_bench.vllm.load`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from vtoken.demo.trained_model import TrainedModelError
from vtoken_bench import target
from vtoken_bench.claims import Claim
from vtoken_bench.engines import Engine, EngineError
from vtoken_bench.output import Table, finish, new_result
from vtoken_bench.target import DEMO, TRAINED, TargetError

BLOCK_SIZE = 32  # stock vLLM on CPU takes multiples of 32
NATIVE, NATIVE_DRAFTS = "native", "native, drafts"
VTOKEN_DRAFTS, EVICTING = "vtoken, drafts", "vtoken, drafts, half the memory"
VARIANTS = (NATIVE, NATIVE_DRAFTS, VTOKEN_DRAFTS, EVICTING)
TEXT = (
    "| order {0} | paid | sent from warehouse {1} to customer {0} on the {2}th day of the month |\n"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--layers", type=int, default=1, help="of the draft model (default: 1)")
    add("--drafts", type=int, default=2, help="of a request in a step (default: 2)")
    add("--requests", type=int, help="of a run (default: 8)")
    add("--prompt", type=int, help="tokens (default: 384)")
    add("--output", type=int, help="tokens (default: 128)")
    add("--repeats", type=int, help="(default: 5)")
    add("--model", default=TRAINED, help=f"{DEMO}, {TRAINED} or a folder (default: {TRAINED})")
    target.add_arguments(parser)


def first_layers(model: Path, folder: Path, num_layers: int) -> Path:
    """`model`, a folder, without its layers from `num_layers` on, in the new `folder`."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": num_layers}))
    for weights in folder.glob("*.safetensors"):
        kept = {
            name: weight
            for name, weight in load_file(weights).items()
            if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
        }
        save_file(kept, weights, metadata={"format": "pt"})
    return folder


class Run(NamedTuple):
    """One load on one fresh engine."""

    variant: str
    repeat: int
    figures: dict[str, Any]


class Bench:
    """The loads of one command line, on `model` and a `drafter`."""

    def __init__(self, args: argparse.Namespace, model: Path, drafter: Path) -> None:
        from transformers import AutoTokenizer

        self._args, self._model, self._drafter = args, model, drafter
        self._target = target.target(args)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self.runs: list[Run] = []

    def run(self) -> None:
        for repeat in range(self._args.repeats):
            for variant in VARIANTS if repeat % 2 == 0 else VARIANTS[::-1]:
                self._measure(variant, repeat)

    def of(self, variant: str) -> list[Run]:
        return sorted((r for r in self.runs if r.variant == variant), key=lambda r: r.repeat)

    def _prompt(self, number: int) -> list[int]:
        """Lines of one form, as many as the prompt takes."""
        lines = "".join(
            TEXT.format(number * 7 + line % 3, line % 3, line % 3) for line in range(99)
        )
        ids: list[int] = self._tokenizer(lines)["input_ids"][: self._args.prompt]
        return ids

    def _measure(self, variant: str, repeat: int) -> None:
        args = self._args
        longest = args.prompt + args.output + 1 + 2 * args.drafts
        num_blocks = -(-longest // BLOCK_SIZE) * args.requests
        requests = [
            {"prompt": self._prompt(repeat * args.requests + i), "num_new": args.output}
            for i in range(args.requests)
        ]
        others: dict[str, Any] = {}
        if variant != NATIVE:
            others["speculative_config"] = {
                "method": "draft_model",
                "model": str(self._drafter),
                "num_speculative_tokens": args.drafts,
            }
        arguments = self._target.engine_args(
            self._model,
            block_size=BLOCK_SIZE,
            max_model_len=longest,
            num_blocks=num_blocks // 2 if variant == EVICTING else num_blocks,
            **others,
        )
        arguments["kv_cache_memory_bytes"] *= 2  # the blocks are given; both models have some
        engine = Engine(
            variant,
            {} if variant in (VTOKEN_DRAFTS, EVICTING) else None,
            arguments,
            threads=self._target.threads,
            settings=self._target.settings(),
        )
        try:
            engine.ask({"requests": requests[:1]})  # warm
            figures = engine.ask({"requests": requests, "sample_every": 1})
        finally:
            engine.close()
        self.runs.append(Run(variant, repeat, figures))
        print(
            f"{variant}, repeat {repeat + 1}: {_speed(self.runs[-1]):.1f} tokens/s, "
            f"{figures['steps']} steps",
            file=sys.stderr,
            flush=True,
        )


def run(args: argparse.Namespace) -> int:
    sizes = (("requests", 8, 4), ("prompt", 384, 96), ("output", 128, 32), ("repeats", 5, 1))
    for name, full, quick in sizes:
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else full)
    started = time.monotonic()
    try:
        model = target.model_folder(args.model)
        setup = {
            "model": model.name,
            **target.target(args).described(),
            "draft model": f"its first {args.layers} layer(s)",
            "drafts": args.drafts,
            "requests": args.requests,
            "prompt tokens": args.prompt,
            "output tokens": args.output,
            "repeats": args.repeats,
        }
        result = new_result("drafters", "vtoken bench drafters", setup)
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(args, model, first_layers(model, Path(folder, "drafter"), args.layers))
            bench.run()
    except (TrainedModelError, TargetError, EngineError, OSError, ValueError) as error:
        print(f"vtoken bench drafters: {error}", file=sys.stderr)
        return 1
    result.tables = [table(bench.runs)]
    result.claims = claims(bench, model.name)
    result.raw = [run._asdict() for run in bench.runs]
    result.seconds = time.monotonic() - started
    finish(result, path=args.json, markdown=args.markdown)
    return 0


def table(runs: Sequence[Run]) -> Table:
    """Medians over the repeats."""
    rows: list[list[str | int | float | None]] = []
    for variant in dict.fromkeys(r.variant for r in runs):
        found = [r.figures for r in runs if r.variant == variant]
        rows.append(
            [
                variant,
                round(median(f["tokens"] / f["seconds"] for f in found), 1),
                median(f["steps"] for f in found),
                round(median(f["ttft_ms"]["p50"] / 1e3 for f in found), 2),
                sum(f["preemptions"] for f in found),
                max(f["most_running"] for f in found),
            ]
        )
    columns = ["variant", "tokens/s", "steps", "TTFT p50 [s]", "preempted", "most at once"]
    return Table("A draft model and eviction at half the memory", columns, rows, [])


def claims(bench: Bench, model: str) -> list[Claim]:
    """Ratios of paired runs; the interval is Student's over the repeats, of the mean."""
    pairs = (
        ("drafts, of none, native", NATIVE_DRAFTS, NATIVE),
        ("vToken, of native, with drafts", VTOKEN_DRAFTS, NATIVE_DRAFTS),
        ("vToken with drafts at half the memory, of native in ample memory", EVICTING, NATIVE),
        ("half the memory, of ample, vToken with drafts", EVICTING, VTOKEN_DRAFTS),
    )
    return [
        Claim.of(
            "Drafters",
            f"Tokens a second of {what}",
            model,
            [_speed(a) / _speed(b) for a, b in zip(bench.of(one), bench.of(other), strict=True)],
            "x",
        )
        for what, one, other in pairs
    ]


def _speed(run: Run) -> float:
    speed: float = run.figures["tokens"] / run.figures["seconds"]
    return speed
