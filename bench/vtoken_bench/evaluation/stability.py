"""Whether reclaiming changes what is generated (paper, 5.8 and table 2).

`questions`: the same requests under naive-evict and under vToken, token by token. Every relocated
token's K and V are read back and compared (invariants I1 and I2): an engine in which one differs
stops. Beside them native: what eviction itself changes is the policy's doing.

Under the defaults tokens of short requests go into freed slots and few are relocated; under the
paper's rules all reclaiming is relocation.

`continuations`: the paper's metric. Each output is scored against the text's own continuation, and
the two scores of a pair are subtracted. In bfloat16, where outputs differ, the same differences are
taken between runs without any reclamation that only compute in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from vtoken_bench.claims import Claim
from vtoken_bench.evaluation.points import (
    Comparison,
    Experiment,
    Point,
    Run,
    Setting,
    pick,
    spread,
    variant_points,
)
from vtoken_bench.evaluation.variants import DEFAULTS, NAIVE, NATIVE, PAPER, POOL
from vtoken_bench.evaluation.workloads import Workload
from vtoken_bench.grounds.paired import Interval, share
from vtoken_bench.output import Result, Table
from vtoken_bench.quality.measures import rouge_l
from vtoken_bench.target import DEMO

CONCURRENCY = 8
CHAT_TOKENS = 128  # of the template and the question, at most
POLICIES = ("h2o", "random", "tova")
KEEP = 0.5
QUESTIONS, CONTINUATIONS = "questions", "continuations"

PAIRS = 144  # as many as the paper has
FEW_PAIRS = 32  # in bfloat16, where shares are far from 0 and 1
NEAR = 0.01  # the paper's bound on the difference of two scores
PAPER_DIFFERENCE, PAPER_NEAR, PAPER_LENGTH = "-0.0016", "93.1", "0.99"
# Nothing is reclaimed here; the sums of a step are taken in another order.
FEWER_CLIENTS = f"{CONCURRENCY // 2} clients"
THREADS = 2  # a second thread divides a long sum
NATIVE_FEWER, NATIVE_THREADS = f"{NATIVE}, {FEWER_CLIENTS}", f"{NATIVE}, {THREADS} threads"
NAIVE_FEWER = f"{NAIVE}, {FEWER_CLIENTS}"
# variant, and whose outputs its own are compared with
COMPARED = (
    (NAIVE, NATIVE),
    (PAPER, NAIVE),
    (DEFAULTS, NAIVE),
    (NAIVE_FEWER, NAIVE),
    (NATIVE_FEWER, NATIVE),
    (NATIVE_THREADS, NATIVE),
)


def comparisons(setting: Setting) -> list[Comparison]:
    """Scores need a trained model; on a CPU the tiny one shows how many outputs differ in bfloat16,
    which a CPU may have to emulate.
    """
    found = []
    if not setting.slow:
        found.append(Comparison("matched outputs", _questions(setting), 1))
    if setting.slow or setting.on_gpu:
        points = _continuations(setting, "float32", PAIRS, (NAIVE, PAPER, DEFAULTS))
        found.append(Comparison("scores against references", points, 1))
    if not setting.slow:
        points = _continuations(setting, "bfloat16", FEW_PAIRS, (NATIVE, NAIVE, PAPER, DEFAULTS))
        native, naive, *_ = points
        fewer = CONCURRENCY // 2
        points.append(_named(NAIVE_FEWER, naive, concurrency=fewer))
        points.append(_named(NATIVE_FEWER, native, concurrency=fewer))
        if not setting.on_gpu:
            engine = replace(native.engine, threads=THREADS)
            points.append(_named(NATIVE_THREADS, native, engine=engine))
        found.append(Comparison("another order of sums", points, 1))
    return found


def _questions(setting: Setting) -> list[Point]:
    sizes = (2048, 512) if setting.on_gpu else (192, 128)
    workload = Workload("answers to questions about a text", sizes)
    policies = POLICIES[-1:] if setting.quick else POLICIES
    points: list[Point] = []
    for policy in policies:
        stock, evicting = _pair(
            setting,
            {"task": QUESTIONS, "dtype": "float32", "policy": policy},
            workload,
            8 if setting.quick else 16,
            longest=sum(sizes) + CHAT_TOKENS,
        )
        names: tuple[str, ...] = (NAIVE, PAPER, DEFAULTS)
        if policy == policies[0]:
            names = (NATIVE, *names)
        points += variant_points(
            names,
            replace(stock, questions=True),
            replace(evicting, questions=True),
            {"name": policy},
        )
    return points


def _continuations(
    setting: Setting, dtype: str, num_pairs: int, names: Sequence[str]
) -> list[Point]:
    sizes = (1024, 256) if setting.on_gpu else (128, 64)
    workload = Workload("continuations of a text", sizes)
    policy, num_requests = POLICIES[-1], 8 if setting.quick else num_pairs
    labels = {"task": CONTINUATIONS, "dtype": dtype, "policy": policy}
    stock, evicting = _pair(setting, labels, workload, num_requests, longest=sum(sizes))
    return variant_points(
        names,
        replace(stock, continues=True),
        replace(evicting, continues=True),
        {"name": policy},
    )


def _pair(
    setting: Setting,
    labels: dict[str, str],
    workload: Workload,
    num_requests: int,
    *,
    longest: int,
) -> tuple[Point, Point]:
    """Stock vLLM's point and the evicting variants', all of whose relocations are read back."""
    # All fit: who is preempted is computed anew, and its evictions are decided anew.
    blocks = (CONCURRENCY + 1) * -(-longest // setting.block_size)
    engine = replace(
        setting.engine(stock=False, num_blocks=blocks, max_model_len=longest),
        dtype=labels["dtype"],
    )
    config = {"verify_ratio": 1.0, "theta_f": 0.0, "low_watermark_blocks": POOL}
    evicting = Point(
        labels,
        engine,
        config,
        workload,
        num_requests,
        KEEP,
        concurrency=CONCURRENCY,
        sample_every=0,
        keep_tokens=True,
    )
    return replace(
        evicting,
        labels=labels | {"policy": "none"},
        engine=replace(engine, stock=True),
        config={},
        keep=None,
    ), evicting


def _named(variant: str, point: Point, **changes: Any) -> Point:
    return replace(point, labels={**point.labels, "variant": variant}, **changes)


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds outputs against naive-evict's, naive-evict's against native's, and their scores."""
    if found := pick(runs, task=QUESTIONS):
        _report_questions(result, model, found)
    if found := pick(runs, task=CONTINUATIONS):
        _report_continuations(result, model, found)


def _report_questions(result: Result, model: str, runs: list[Run]) -> None:
    table = Table(
        f"{model}: matched outputs",
        [
            "numbers, policy, variant",
            "against",
            "outputs",
            "equal, token by token",
            "ROUGE-L of one against the other, mean",
            "length ratio, median",
            "relocations, all read back",
            "slots recycled",
        ],
        [],
        ["ROUGE-L over token ids; outputs end where the model ends them, after 128 tokens at most"],
    )
    for dtype in dict.fromkeys(str(run.labels["dtype"]) for run in runs):
        at = pick(runs, dtype=dtype)
        native = pick(at, variant=NATIVE)
        for policy in dict.fromkeys(str(r.labels["policy"]) for r in at):
            naive = pick(at, policy=policy, variant=NAIVE)
            for variant in (NAIVE, PAPER, DEFAULTS):
                chosen = pick(at, policy=policy, variant=variant)
                against, name = (native, NATIVE) if variant == NAIVE else (naive, NAIVE)
                if not chosen or not against:
                    continue
                _matched_row(result, table, model, chosen[0], against[0], name)
    result.tables.append(table)


def _matched_row(
    result: Result, table: Table, model: str, one: Run, other: Run, against: str
) -> None:
    pairs = _pairs(one, other)
    name = ", ".join(str(one.labels[key]) for key in ("dtype", "policy", "variant"))
    table.rows.append(
        [
            name,
            against,
            len(pairs),
            sum(mine == theirs for mine, theirs in pairs),
            fmean(rouge_l(mine, theirs) for mine, theirs in pairs),
            _length_ratio(pairs),
            _verified(one),
            _recycled(one),
        ]
    )
    if against == NAIVE and _verified(one):
        result.claims.append(_verified_claim(one, model))


def _report_continuations(result: Result, model: str, runs: list[Run]) -> None:
    table = Table(
        f"{model}: scores of continuations of a text, {POLICIES[-1]}",
        [
            "numbers, variant",
            "against",
            "pairs",
            "equal, token by token [%]",
            "ROUGE-L",
            "the other's",
            "difference, mean",
            f"differences <= {NEAR} [%]",
            "length ratio, median",
            "relocations, all read back",
            "slots recycled",
        ],
        [],
        [
            "ROUGE-L F1 over token ids against the text's own continuation; difference: of the"
            " pair's two scores, with its sign",
            "[..]: 95% interval, exact for a share (Clopper-Pearson), Student's t over the pairs"
            " for a mean",
        ],
    )
    if model == DEMO:
        table.notes.append("its weights are random: the scores are those of noise")
    for dtype in dict.fromkeys(str(run.labels["dtype"]) for run in runs):
        at = pick(runs, dtype=dtype)
        for variant, against in COMPARED:
            chosen, others = pick(at, variant=variant), pick(at, variant=against)
            if chosen and others:
                _scored_row(result, table, model, chosen[0], others[0])
    result.tables.append(table)


def _scored_row(result: Result, table: Table, model: str, one: Run, other: Run) -> None:
    pairs = _pairs(one, other)
    scores, others = _scores(one), _scores(other)
    differences = [mine - theirs for mine, theirs in zip(scores, others, strict=True)]
    difference = _mean(differences)
    near = share([abs(value) <= NEAR for value in differences])
    equal = share([mine == theirs for mine, theirs in pairs])
    ratio = _length_ratio(pairs)
    against = str(other.labels["variant"])
    name = f"{one.labels['dtype']}, {one.labels['variant']}"
    table.rows.append(
        [
            name,
            against,
            len(pairs),
            _percent(equal),
            fmean(scores),
            fmean(others),
            f"{difference.value:.4f} [{difference.low:.4f} .. {difference.high:.4f}]",
            _percent(near),
            ratio,
            _verified(one),
            _recycled(one),
        ]
    )
    if one.labels["variant"] not in (PAPER, DEFAULTS):
        return
    if _verified(one):
        result.claims.append(_verified_claim(one, model))
    if model == DEMO:
        return  # a random model's outputs continue no text
    for what, found, unit, scale, paper in (
        ("difference of scores, mean", difference, "", 1, PAPER_DIFFERENCE),
        (f"differences at most {NEAR}", near, "%", 100, PAPER_NEAR),
        ("length ratio, median", Interval(ratio, ratio, ratio), "x", 1, PAPER_LENGTH),
    ):
        value, low, high = (scale * end for end in (found.value, found.low, found.high))
        interval = None if unit == "x" else (low, high)
        result.claims.append(
            Claim(
                "Table 2",
                f"{what}, {name}, against {against}",
                model,
                *(value, value, value),
                unit,
                1,
                paper,
                interval=interval,
            )
        )


def _verified(run: Run) -> int:
    return int(run.figures.get("verified_relocations", 0))  # stock vLLM has none


def _recycled(run: Run) -> int:
    return int(run.figures.get("recycled_slots", 0))


def _verified_claim(run: Run, model: str) -> Claim:
    name = ", ".join(str(run.labels[key]) for key in ("task", "dtype", "policy", "variant"))
    what = f"relocations read back and equal, {name}"
    return spread([_verified(run)]).claim("I1, I2", what, model, "relocations", "all")


def _pairs(one: Run, other: Run) -> list[tuple[list[int], list[int]]]:
    return list(zip(one.figures["output_ids"], other.figures["output_ids"], strict=True))


def _scores(run: Run) -> list[float]:
    """Each output's ROUGE-L against its reference."""
    outputs, references = run.figures["output_ids"], run.figures["reference_ids"]
    return [rouge_l(*pair) for pair in zip(outputs, references, strict=True)]


def _length_ratio(pairs: Sequence[tuple[list[int], list[int]]]) -> float:
    return spread([len(mine) / len(theirs) for mine, theirs in pairs if theirs]).median


def _mean(values: Sequence[float]) -> Interval:
    """The mean with its interval; as one point for fewer than three values."""
    middle = fmean(values)
    return Interval(middle, *(spread(values).interval() or (middle, middle)))


def _percent(found: Interval) -> str:
    return f"{100 * found.value:.1f} [{100 * found.low:.0f} .. {100 * found.high:.0f}]"


EXPERIMENT = Experiment(
    "stability",
    "outputs of vToken against naive-evict's, and their scores; every relocation read back",
    "section 5.8, table 2",
    comparisons,
    report,
)
