"""`vtoken bench speculation`: drafts beside eviction, on text that repeats itself.

Four engines: native vLLM and vToken, each with and without the n-gram drafter. The pool holds half
of what all requests hold natively at their ends. Every run has a fresh engine process; variants are
interleaved, forwards and backwards in turn. The clock runs during steps only, see
`vtoken_bench.vllm.load`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vtoken.demo.trained_model import TrainedModelError
from vtoken_bench import target
from vtoken_bench.claims import Claim
from vtoken_bench.engines import Engine, EngineError
from vtoken_bench.evaluation.points import spread
from vtoken_bench.output import Table, finish, new_result
from vtoken_bench.target import DEMO, TRAINED, TargetError

BLOCK_SIZE = 32  # stock vLLM on CPU takes multiples of 32
NATIVE, NATIVE_DRAFTS = "native", "native, drafts"
VTOKEN, VTOKEN_DRAFTS = "vtoken", "vtoken, drafts"
VARIANTS = (NATIVE, NATIVE_DRAFTS, VTOKEN, VTOKEN_DRAFTS)
TEXT = (
    "| order {0} | paid | sent from warehouse {1} to customer {0} on the {2}th day of the month |\n"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--policy", default="streaming_llm", help="(default: streaming_llm)")
    add("--keep", type=target.share, default=0.5, help="budget, of prompt and output (default: .5)")
    add("--drafts", type=int, default=4, help="most drafts of a request in a step (default: 4)")
    add("--requests", type=int, help="of a run (default: 8)")
    add("--prompt", type=int, help="tokens (default: 384)")
    add("--output", type=int, help="tokens (default: 128)")
    add("--repeats", type=int, help="(default: 3)")
    add("--model", default=TRAINED, help=f"{DEMO}, {TRAINED} or a folder (default: {TRAINED})")
    target.add_arguments(parser)


class Run(NamedTuple):
    """One load on one fresh engine."""

    variant: str
    repeat: int
    figures: dict[str, Any]


class Bench:
    """The loads of one command line, on one model."""

    def __init__(self, args: argparse.Namespace, model: Path) -> None:
        from transformers import AutoTokenizer

        self._args, self._model = args, model
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
        longest = args.prompt + args.output + 1 + args.drafts
        requests = [
            {"prompt": self._prompt(repeat * args.requests + i), "num_new": args.output}
            for i in range(args.requests)
        ]
        others: dict[str, Any] = {}
        if variant.endswith("drafts"):
            others["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": args.drafts,
                "prompt_lookup_min": 2,
                "prompt_lookup_max": 4,
            }
        config = None
        if variant.startswith(VTOKEN):
            config = {
                "policy": {"name": args.policy},
                "budget_tokens": round(args.keep * (args.prompt + args.output)),
                "interval_tokens": 32,
            }
        engine = Engine(
            variant,
            config,
            self._target.engine_args(
                self._model,
                block_size=BLOCK_SIZE,
                max_model_len=longest,
                num_blocks=-(-longest // BLOCK_SIZE) * args.requests // 2,
                **others,
            ),
            threads=self._target.threads,
            settings=self._target.settings() | {"calibration": "off"},
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
    sizes = (("requests", 8, 4), ("prompt", 384, 96), ("output", 128, 32), ("repeats", 3, 1))
    for name, full, quick in sizes:
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else full)
    # The n-gram drafter, a parallel kernel of Numba, sets the threads of all kernels of stock vLLM
    # (docs/models.md): every variant keeps its own.
    os.environ.setdefault("NUMBA_NUM_THREADS", str(args.threads or os.cpu_count()))
    started = time.monotonic()
    try:
        model = target.model_folder(args.model)
        setup = {
            "model": model.name,
            **target.target(args).described(),
            "policy": args.policy,
            "budget": args.keep,
            "drafts": args.drafts,
            "requests": args.requests,
            "prompt tokens": args.prompt,
            "output tokens": args.output,
            "repeats": args.repeats,
        }
        result = new_result("speculation", "vtoken bench speculation", setup)
        bench = Bench(args, model)
        bench.run()
    except (TrainedModelError, TargetError, EngineError, OSError, ValueError) as error:
        print(f"vtoken bench speculation: {error}", file=sys.stderr)
        return 1
    result.tables = [table(bench.runs)]
    result.claims = claims(bench, model.name)
    result.raw = [run._asdict() for run in bench.runs]
    result.seconds = time.monotonic() - started
    finish(result, path=args.json, markdown=args.markdown)
    return 0


def table(runs: Sequence[Run]) -> Table:
    """Medians over the repeats, with their range in brackets."""
    rows: list[list[str | int | float | None]] = []
    for variant in dict.fromkeys(r.variant for r in runs):
        found = [r.figures for r in runs if r.variant == variant]
        memory = [f["memory"]["f"] for f in found if "memory" in f]
        rows.append(
            [
                variant,
                str(spread([f["tokens"] / f["seconds"] for f in found])),
                str(spread([f["steps"] for f in found])),
                str(spread([f["ttft_ms"]["p50"] / 1e3 for f in found])),
                str(spread([100 * f for f in memory])) if memory else None,
                sum(f["preemptions"] for f in found),
                max(f["most_running"] for f in found),
            ]
        )
    columns = ["variant", "tokens/s", "steps", "TTFT p50 [s]", "F [%]", "preempted", "most at once"]
    notes = ["F: mean over the steps in which a request decodes, with the step's drafts taken back"]
    return Table("Drafts and eviction at half the memory", columns, rows, notes)


def claims(bench: Bench, model: str) -> list[Claim]:
    """Ratios of paired runs; the interval is Student's over the repeats, of the mean."""
    pairs = (
        ("drafts, of none, native", NATIVE_DRAFTS, NATIVE),
        ("drafts, of none, vToken", VTOKEN_DRAFTS, VTOKEN),
        ("vToken, of native, without drafts", VTOKEN, NATIVE),
        ("vToken, of native, with drafts", VTOKEN_DRAFTS, NATIVE_DRAFTS),
    )
    return [
        spread(
            [_speed(a) / _speed(b) for a, b in zip(bench.of(one), bench.of(other), strict=True)]
        ).claim("Speculation", f"Tokens a second of {what}", model, "x", "", "")
        for what, one, other in pairs
    ]


def _speed(run: Run) -> float:
    speed: float = run.figures["tokens"] / run.figures["seconds"]
    return speed
