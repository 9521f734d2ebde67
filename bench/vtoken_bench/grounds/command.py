"""`vtoken bench grounds`: which facts are found under eviction, paired with the full cache.

1. A sample that is in the log under the same key is not answered again.
2. All settings of a sample run together, so a partial run is balanced.
3. A sample counts as found if the output contains every gold string of its fact.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from msgspec import convert

import vtoken
from vtoken.base.errors import RefusedError
from vtoken.demo.trained_model import TrainedModelError
from vtoken_bench import target
from vtoken_bench.engines import EngineError
from vtoken_bench.grounds import tables
from vtoken_bench.grounds.engines import Engines
from vtoken_bench.grounds.prompts import CASES, OUTPUT_TOKENS, Case, Prompt, PromptMaker
from vtoken_bench.grounds.settings import (
    FULL,
    INTERVAL_TOKENS,
    Setting,
    every_policy,
    model_key,
    numbers_key,
    parsed,
    settings,
    with_tools,
)
from vtoken_bench.grounds.texts import docstrings
from vtoken_bench.log import Entry, Key, Log
from vtoken_bench.output import FOLDER, Result, finish, new_result, read
from vtoken_bench.progress import Progress
from vtoken_bench.target import GEMMA, MODELS, TRAINED

KEEP = ("1/2", "1/3", "1/6")  # of the prompt
NEW_TOKENS = 32  # of an answer
BATCH = 48  # requests of a group
FAILURES = (TrainedModelError, RefusedError, EngineError, OSError, ValueError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, help="(default: chat; of a base model prefix)")
    add(
        "--policies",
        nargs="+",
        metavar="NAME[:PARAM=VALUE,…]",
        help="(default: all, and the papers' parameters where defaults differ)",
    )
    keep = [target.share(text) for text in KEEP]
    add("--keep", nargs="+", type=target.share, default=keep, help=f"(default: {' '.join(KEEP)})")
    add("--samples", type=int, default=200, help="per case (default: 200)")
    add("--seed", type=int, default=0, help="other prompts (default: 0)")
    add("--tokens", type=int, default=500, help="of the text in a prompt (default: 500)")
    add("--probe-layers", nargs="+", type=int, help="(default: by depth)")
    add("--against", type=Path, metavar="JSON", help="pair the rows with those of another run, too")
    add("--engines", type=int, default=2, help="processes of one thread (default: 2)")
    names = ", ".join((*MODELS, GEMMA))
    add("--model", default=TRAINED, help=f"{names} or a folder (default: {TRAINED})")
    target.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.quick:
        args.samples, args.keep, args.tokens = 4, [target.share("1/3")], 300
        args.policies = args.policies or ["snapkv", "streaming_llm"]
    try:
        model = target.model_folder(args.model)
        policies = [parsed(p) for p in args.policies] if args.policies else every_policy()
        bench = Bench(args, settings(policies, args.keep), model)
        bench.run()
        result = bench.result(None if args.against is None else read(args.against))
    except FAILURES as error:
        print(f"vtoken bench grounds: {error}", file=sys.stderr)
        return 1
    finish(result, path=args.json, markdown=args.markdown)
    return 0


@dataclass(frozen=True)
class Sample:
    """One prompt, and the settings that the log has no answer of."""

    case: Case
    number: int
    missing: list[Setting]


class Bench:
    """One run: its samples, and the result of those in the log."""

    def __init__(self, args: argparse.Namespace, found: list[Setting], model: Path) -> None:
        from transformers import AutoTokenizer

        self.args, self.model = args, model
        where = target.target(args)
        self.where = replace(where, threads=where.threads or 1)
        asks_for_tools = args.cases == ["tools"]
        self.settings = [FULL, *(with_tools(found) if asks_for_tools else found)]
        self.maker = PromptMaker(
            AutoTokenizer.from_pretrained(model), seed=args.seed, num_tokens=args.tokens
        )
        args.cases = args.cases or ["chat" if self.maker.chats else "prefix"]
        if "tools" in args.cases and not asks_for_tools:
            raise ValueError("the case tools has its own chat template: run it without others")
        self._template = self.maker.tool_template if asks_for_tools else ""
        folder = args.json.parent if args.json else FOLDER
        self.log = Log(folder / "grounds" / "samples.jsonl")
        text = "\n".join(docstrings())
        self._base: Key = {
            **model_key(model),
            "vtoken": vtoken.__version__,
            "text": sha256(text.encode()).hexdigest()[:8],
            "seed": args.seed,
            "tokens": args.tokens,
            "new": NEW_TOKENS,
            **numbers_key(self.where),
        }
        self._evicting: Key = {"layers": args.probe_layers or []}

    def key(self, case: Case, number: int, setting: Setting) -> Key:
        evicting = {} if setting.full else self._evicting
        return self._base | evicting | {"case": case, "number": number} | setting.key()

    # ------------------------------------------------------------ running

    def run(self) -> None:
        """Answer the samples that the log lacks. Raises EngineError."""
        samples = [
            Sample(case, number, missing)
            for number in range(self.args.samples)
            for case in self.args.cases
            if (missing := [s for s in self.settings if not self._known(case, number, s)])
        ]
        if not samples:
            return
        engines = Engines(
            self.model,
            self.where,
            count=min(self.args.engines, len(samples)),
            num_tokens=self._most_tokens(),
            config={"probe": {"layers": self.args.probe_layers or []}},
            chat_template=self._template,
        )
        try:
            with closing(engines):
                self._run(engines, samples)
        except KeyboardInterrupt:
            print("interrupted; run the same command to continue", file=sys.stderr)

    def _most_tokens(self) -> int:
        """Of the longest request, output included."""
        if self._template:
            prompts = [self.maker.prompt("tools", number) for number in range(self.args.samples)]
            return max(len(prompt.ids) + len(prompt.forced) for prompt in prompts) + 1
        turns = 2 * self.args.tokens + OUTPUT_TOKENS if "long" in self.args.cases else 0
        tokens: int = max(self.args.tokens + 400, turns)
        return tokens

    def _known(self, case: Case, number: int, setting: Setting) -> bool:
        return self.log.get(self.key(case, number, setting)) is not None

    def _run(self, engines: Engines, samples: list[Sample]) -> None:
        """Answer `samples` in groups that fill an engine's batch; what is answered is logged."""
        size = max(1, BATCH // len(self.settings))
        groups = [samples[i : i + size] for i in range(0, len(samples), size)]
        progress = Progress("grounds", len(groups), 0)
        with ThreadPoolExecutor(self.args.engines) as pool:
            answers = [pool.submit(self._answer, engines, group) for group in groups]
            try:
                for future in as_completed(answers):
                    for key, value, seconds in future.result():
                        self.log.add(key, value, seconds)
                    progress.step("groups of samples")
            finally:
                pool.shutdown(cancel_futures=True)

    def _answer(self, engines: Engines, group: list[Sample]) -> list[tuple[Key, Any, float]]:
        """Log entries of the group's samples; the time is shared equally."""
        started = time.monotonic()
        asked: list[tuple[Key, Prompt, Setting]] = []
        values: list[tuple[Key, Any]] = []
        for sample in group:
            prompt = self.maker.prompt(sample.case, sample.number)
            for setting in sample.missing:
                key = self.key(sample.case, sample.number, setting)
                if setting.fits(len(prompt.ids)):
                    asked.append((key, prompt, setting))
                else:
                    values.append((key, {"none": "budget"}))
        outputs = engines.answers([(p, s) for _, p, s in asked], NEW_TOKENS) if asked else []
        for (key, prompt, _), ids in zip(asked, outputs, strict=True):
            values.append((key, self._value(prompt, ids)))
        seconds = (time.monotonic() - started) / len(values)
        return [(key, value, seconds) for key, value in values]

    def _value(self, prompt: Prompt, ids: list[int]) -> dict[str, Any]:
        text, fact = self.maker.answer_text(ids), prompt.fact
        return {"found": fact.is_in(text), "text": text, "gold": fact.gold, "kind": fact.kind}

    # ------------------------------------------------------------ results

    def result(self, other: Result | None) -> Result:
        """The tables of the samples in the log; `other`: a result to pair the rows with.

        Raises ValueError if the samples of `other` are of another model or seed.
        """
        args = self.args
        setup = {
            "model": self.model.name,
            **self.where.described(),
            "engines": args.engines,
            "seed": args.seed,
            "text tokens": args.tokens,
            "interval": INTERVAL_TOKENS,
            "probed layers": args.probe_layers or "the default",
        }
        if not self.maker.chats:
            setup["prompts"] = "completions: every answer is begun"
        result = new_result("grounds", "make bench-grounds", setup)
        entries = list(self._entries())
        result.started = min((entry.at for entry in entries), default="")
        result.commit = ", ".join(sorted({entry.commit for entry in entries}))
        rows = [row for case in args.cases for row in self._rows(case)]
        result.tables, result.charts = tables.tables(rows), tables.charts(rows)
        if other is not None:
            for name in ("model", "seed", "text tokens"):
                if other.setup[name] != setup[name]:
                    raise ValueError(f"--against has {name} {other.setup[name]}, not {setup[name]}")
            result.tables.append(tables.against(rows, convert(other.raw, list[tables.Row])))
        result.raw = rows
        result.seconds = sum(entry.seconds for entry in entries) / args.engines
        return result

    def _rows(self, case: Case) -> list[tables.Row]:
        """One row a setting, over the samples that every setting has answered."""
        answered = {
            number: [self.log.get(self.key(case, number, setting)) for setting in self.settings]
            for number in range(self.args.samples)
        }
        whole = {n: values for n, values in answered.items() if None not in values}
        return [
            tables.Row(
                case=case,
                policy=setting.label,
                keep=setting.keep,
                found=_bits([values[i].get("found") for values in whole.values()]),
                tools=setting.tools,
            )
            for i, setting in enumerate(self.settings)
        ]

    def _entries(self) -> Iterator[Entry]:
        """What the log has of this run."""
        for case, number in product(self.args.cases, range(self.args.samples)):
            for setting in self.settings:
                entry = self.log.entry(self.key(case, number, setting))
                if entry is not None:
                    yield entry


def _bits(found: Sequence[bool | None]) -> str:
    """A character a sample: 1 found, 0 not found, - the budget is below the policy's minimum."""
    return "".join("-" if value is None else str(int(value)) for value in found)
