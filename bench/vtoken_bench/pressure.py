"""`vtoken bench pressure`: a fixed budget and eviction under pressure, beside native vLLM.

One policy and one floor, a share of the prompt. Requests are the test ground's chats
(`vtoken_bench.grounds`); their outputs are scored in the same run. Every run has a fresh engine
process; variants are interleaved, forwards and backwards in turn.

    ample      four clients and a pool that holds them: CPU time and tokens beside policy `none`
    saturated  all requests at once, and a pool that holds a quarter of them; also `fixed, higher`,
               a fixed budget that is to keep as much as pressure does
    between    Poisson arrivals at shares of what native vLLM serves when saturated

The clock runs during steps only, see `vtoken_bench.vllm.load`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from vtoken.demo.trained_model import TrainedModelError
from vtoken_bench import target
from vtoken_bench.engines import Engine, EngineError
from vtoken_bench.evaluation.points import spread
from vtoken_bench.grounds.paired import Pairs, holm
from vtoken_bench.grounds.prompts import GROUNDS, Prompt, PromptMaker
from vtoken_bench.output import Claim, Table, finish, new_result
from vtoken_bench.quality.measures import string_match_all
from vtoken_bench.target import DEMO, TRAINED, TargetError

BLOCK_SIZE = 32  # stock vLLM on CPU takes multiples of 32
TEXT_TOKENS = 200
NUM_NEW = 128
AMPLE_CLIENTS = 4
KEEP, HIGHER = 0.3333, 0.55
NATIVE, NONE, FIXED, PRESSURE = "native", "none", "fixed", "pressure"
FIXED_HIGHER = "fixed, higher"
AMPLE, SATURATED = "ample", "saturated"
VARIANTS = (NATIVE, FIXED, PRESSURE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--policy", default="keydiff", help="(default: keydiff)")
    add("--keep", type=target.share, default=KEEP, help="floor, of the prompt (default: 1/3)")
    add("--higher", type=target.share, default=HIGHER, help=f"the other budget (default: {HIGHER})")
    add("--requests", type=int, help="of a run (default: 16)")
    add("--repeats", type=int, help="(default: 4)")
    add("--rates", nargs="*", type=float, help="of native's saturated rate (default: .5 1 1.5)")
    add("--model", default=TRAINED, help=f"{DEMO}, {TRAINED} or a folder (default: {TRAINED})")
    target.add_arguments(parser)


class Run(NamedTuple):
    """One load on one fresh engine. `rate`: requests a second; None: all at once, or clients."""

    situation: str
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
        self._prompts: dict[int, list[Prompt]] = {}
        self.runs: list[Run] = []

    def run(self) -> None:
        args = self._args
        for repeat in range(args.repeats):
            for variant in _order((NONE, PRESSURE, FIXED), repeat):
                self._measure(AMPLE, variant, repeat, None)
            for variant in _order((*VARIANTS, FIXED_HIGHER), repeat):
                self._measure(SATURATED, variant, repeat, None)
        native = [run.figures for run in self.of(NATIVE)]
        served = np.mean([len(figures["requests"]) / figures["seconds"] for figures in native])
        for repeat in range(args.repeats):
            for share in args.rates:
                for variant in _order(VARIANTS, repeat):
                    self._measure(f"{share:g}", variant, repeat, share * float(served))

    def of(self, variant: str, situation: str = SATURATED) -> list[Run]:
        return [r for r in self.runs if (r.variant, r.situation) == (variant, situation)]

    def _measure(self, situation: str, variant: str, repeat: int, rate: float | None) -> None:
        prompts, rng = self._samples(repeat), Random(repeat)
        clock, requests = 0.0, []
        for prompt in prompts:
            request: dict[str, Any] = {"prompt": prompt.ids, "num_new": NUM_NEW}
            if rate is not None:
                clock += rng.expovariate(rate)
                request["arrival_s"] = clock
            requests.append(request)
        longest = max(len(prompt.ids) for prompt in prompts) + NUM_NEW + 1
        whole = -(-longest // BLOCK_SIZE)
        held = AMPLE_CLIENTS * 3 if situation == AMPLE else self._args.requests // 4
        engine = Engine(
            variant,
            self._config(variant),
            self._target.engine_args(
                self._model,
                block_size=BLOCK_SIZE,
                max_model_len=longest,
                num_blocks=whole * held,
            ),
            threads=self._target.threads,
            settings=self._target.settings() | {"calibration": "off"},
        )
        try:
            engine.ask({"requests": requests[:1], "natural_end": True})  # warm
            load = {"requests": requests, "keep_tokens": True}
            if situation == AMPLE:
                load["concurrency"] = AMPLE_CLIENTS
            figures = engine.ask(load)
        finally:
            engine.close()
        figures["found"] = [
            self._found(prompt, ids)
            for prompt, ids in zip(prompts, figures.pop("output_ids"), strict=True)
        ]
        figures["kept"] = figures.get("kept_share_sum", len(prompts)) / len(prompts)
        self.runs.append(Run(situation, variant, repeat, figures))
        speed = figures["tokens"] / figures["seconds"]
        print(
            f"{situation}, {variant}, repeat {repeat + 1}: {speed:.1f} tokens/s, "
            f"{100 * figures['kept']:.0f}% kept, {sum(figures['found'])} of {len(prompts)} found",
            file=sys.stderr,
            flush=True,
        )

    def _config(self, variant: str) -> dict[str, Any] | None:
        if variant == NATIVE:
            return None
        if variant == NONE:
            return {"policy": {"name": "none"}}
        return {
            "policy": {"name": self._args.policy},
            "budget_ratio": self._args.higher if variant == FIXED_HIGHER else self._args.keep,
            "budget_floor_tokens": 64,
            "interval_tokens": 32,
            "evict_when": "pressure" if variant == PRESSURE else "always",
        }

    def _samples(self, repeat: int) -> list[Prompt]:
        """The prompts of a repeat, the same for every variant."""
        if repeat not in self._prompts:
            maker = PromptMaker(
                self._tokenizer, GROUNDS["test"], seed=10 + repeat, num_tokens=TEXT_TOKENS
            )
            self._prompts[repeat] = [maker.prompt("chat", i) for i in range(self._args.requests)]
            self._maker = maker
        return self._prompts[repeat]

    def _found(self, prompt: Prompt, ids: Sequence[int]) -> bool:
        return string_match_all(self._maker.answer_text(ids), prompt.fact.gold) == 1.0


def _order(variants: Sequence[str], repeat: int) -> Sequence[str]:
    return variants if repeat % 2 == 0 else variants[::-1]


def run(args: argparse.Namespace) -> int:
    for name, full, quick in (("requests", 16, 8), ("repeats", 4, 1), ("rates", [0.5, 1, 1.5], [])):
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else full)
    started = time.monotonic()
    try:
        model = target.model_folder(args.model)
        setup = {
            "model": model.name,
            **target.target(args).described(),
            "policy": args.policy,
            "floor": args.keep,
            "higher": args.higher,
            "requests": args.requests,
            "prompt text tokens": TEXT_TOKENS,
            "output tokens": NUM_NEW,
            "repeats": args.repeats,
        }
        result = new_result("pressure", "make bench-pressure", setup)
        bench = Bench(args, model)
        bench.run()
    except (TrainedModelError, TargetError, EngineError, OSError, ValueError) as error:
        print(f"vtoken bench pressure: {error}", file=sys.stderr)
        return 1
    result.tables = tables(bench.runs)
    result.claims = claims(bench, model.name)
    result.raw = [
        {**r._asdict(), "figures": {k: v for k, v in r.figures.items() if k in RAW}}
        for r in bench.runs
    ]
    result.seconds = time.monotonic() - started
    finish(result, path=args.json, markdown=args.markdown)
    return 0


RAW = (
    "seconds",
    "cpu_seconds",
    "tokens",
    "steps",
    "itl_ms",
    "ttft_ms",
    "tokens_hash",
    "most_running",
    "preemptions",
    "preemptions_above_floor",
    "step_ms",
    "hook_seconds",
    "moved_tokens",
    "copy_us",
    "evicted_tokens",
    "given_tokens",
    "kept",
    "found",
)


def tables(runs: Sequence[Run]) -> list[Table]:
    """Medians over the repeats, with their range in brackets."""
    situations = list(dict.fromkeys(r.situation for r in runs))
    rows = []
    for situation in situations:
        for variant in dict.fromkeys(r.variant for r in runs if r.situation == situation):
            found = [r.figures for r in runs if (r.situation, r.variant) == (situation, variant)]
            answers = [answer for f in found for answer in f["found"]]
            rows.append(
                [
                    situation,
                    variant,
                    str(spread([f["tokens"] / f["seconds"] for f in found])),
                    str(spread([f["ttft_ms"]["p50"] / 1e3 for f in found])),
                    str(spread([f["ttft_ms"]["p95"] / 1e3 for f in found])),
                    str(spread([f["itl_ms"]["p50"] for f in found])),
                    str(spread([100 * f["kept"] for f in found])),
                    f"{sum(answers)} of {len(answers)}",
                    sum(f["preemptions"] for f in found),
                    max(f["most_running"] for f in found),
                ]
            )
    columns = [
        "load",
        "variant",
        "tokens/s",
        "TTFT p50 [s]",
        "TTFT p95 [s]",
        "between tokens p50 [ms]",
        "kept [%]",
        "facts found",
        "preempted",
        "most at once",
    ]
    notes = [
        "load: of native's saturated rate; kept: live share of a request's tokens at its end, mean",
        "facts found: answers with every string of the fact, all repeats together",
    ]
    title = "Native vLLM, a fixed budget and eviction under pressure"
    return [Table(title, columns, rows, notes), _paired(runs)]


def _paired(runs: Sequence[Run]) -> Table:
    """The facts that pressure finds beside those of each other variant under the same load."""

    def found(situation: str, variant: str) -> list[bool]:
        same = [r for r in runs if (r.situation, r.variant) == (situation, variant)]
        return [
            answer for r in sorted(same, key=lambda r: r.repeat) for answer in r.figures["found"]
        ]

    others = [x for x in dict.fromkeys((r.situation, r.variant) for r in runs) if x[1] != PRESSURE]
    pairs = [Pairs.of(found(situation, PRESSURE), found(situation, v)) for situation, v in others]
    rows: list[list[str | int | float | None]] = []
    p_values = holm([pair.p_equal() for pair in pairs])
    for (situation, variant), pair, p in zip(others, pairs, p_values, strict=True):
        points = pair.difference()
        between = f"{100 * points.value:.0f} [{100 * points.low:.0f} .. {100 * points.high:.0f}]"
        rows.append([situation, variant, pair.gained, pair.lost, between, f"{p:.2g}"])
    columns = ["load", "beside", "only pressure", "only the other", "difference [points]", "p"]
    notes = [
        "answers to the same prompts; difference: score interval, 95%, of paired shares; p: "
        "McNemar's exact test, corrected for the number of rows (Holm)"
    ]
    return Table("Facts found by pressure and by the others", columns, rows, notes)


def claims(bench: Bench, model: str) -> list[Claim]:
    """Ratios of paired runs; the interval is Student's over the repeats, of the mean."""
    pairs = {
        ("Ample: CPU time of pressure, of policy none", "<= 1.01"): [
            a.figures["cpu_seconds"] / b.figures["cpu_seconds"]
            for a, b in zip(bench.of(PRESSURE, AMPLE), bench.of(NONE, AMPLE), strict=True)
        ],
        ("Saturated: tokens a second of pressure, of a fixed budget", ">= 0.97"): [
            _speed(a) / _speed(b) for a, b in zip(bench.of(PRESSURE), bench.of(FIXED), strict=True)
        ],
        **{
            (f"Saturated: {what} of pressure, of {name}", ""): [
                of(a) / of(b) for a, b in zip(bench.of(PRESSURE), bench.of(variant), strict=True)
            ]
            for variant, name in ((FIXED_HIGHER, "the higher fixed budget"), (NATIVE, "native"))
            for what, of in (("tokens a second", _speed), ("median TTFT", _ttft))
        },
    }
    return [
        spread(ratios).claim("Pressure", what, model, "x", "", goal)
        for (what, goal), ratios in pairs.items()
    ]


def _ttft(run: Run) -> float:
    wait: float = run.figures["ttft_ms"]["p50"]
    return wait


def _speed(run: Run) -> float:
    speed: float = run.figures["tokens"] / run.figures["seconds"]
    return speed
