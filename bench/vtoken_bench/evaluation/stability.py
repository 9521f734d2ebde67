"""Whether reclaiming changes what is generated (paper, 5.8 and table 2).

The same requests under naive-evict and under vToken, to their natural end. Every relocated token's
K and V are read back and compared (invariants I1 and I2): an engine in which one differs stops.
Beside them native: what eviction itself changes is the policy's doing.
"""

from __future__ import annotations

from dataclasses import replace

from vtoken_bench.evaluation.points import (
    Comparison,
    Experiment,
    Point,
    Run,
    Setting,
    figures,
    pick,
    spread,
    variant_points,
)
from vtoken_bench.evaluation.variants import DEFAULTS, NAIVE, NATIVE, PAPER, POOL
from vtoken_bench.evaluation.workloads import Workload
from vtoken_bench.output import Result, Table
from vtoken_bench.quality.measures import rouge_l

CONCURRENCY = 8
CHAT_TOKENS = 128  # of the template and the question, at most
POLICIES = ("h2o", "random", "tova")
SAME = 0.01  # an output counts as equal from a ROUGE-L of 1 less this
# The paper's is another metric: differences of two scores against references, over 144 pairs.
PAPER_ROUGE = "another metric"
PAPER_LENGTH = "0.99"


def comparisons(setting: Setting) -> list[Comparison]:
    sizes = (192, 128) if not setting.on_gpu else (2048, 512)
    workload = Workload("answers to questions about a text", sizes)
    longest = sum(sizes) + CHAT_TOKENS
    # All fit: who is preempted is computed anew, and its evictions are decided anew.
    blocks = (CONCURRENCY + 1) * -(-longest // setting.block_size)
    num_requests = 8 if setting.quick else 16
    points: list[Point] = []
    for dtype in ("float32",) if setting.quick else ("float32", "bfloat16"):
        few = setting.quick or (setting.slow and dtype != "float32")
        policies = POLICIES[-1:] if few else POLICIES
        for policy in policies:
            stock, evicting = (
                Point(
                    {"dtype": dtype, "policy": "none" if is_stock else policy},
                    replace(
                        setting.engine(stock=is_stock, num_blocks=blocks, max_model_len=longest),
                        dtype=dtype,
                    ),
                    {}
                    if is_stock
                    else {"verify_ratio": 1.0, "theta_f": 0.0, "low_watermark_blocks": POOL},
                    workload,
                    num_requests,
                    None if is_stock else 0.5,
                    concurrency=CONCURRENCY,
                    sample_every=0,
                    keep_tokens=True,
                    questions=True,
                )
                for is_stock in (True, False)
            )
            names: tuple[str, ...] = (NAIVE, PAPER, DEFAULTS)
            if policy == policies[0]:
                names = (NATIVE, *names)
            points += variant_points(names, stock, evicting, {"name": policy})
    return [Comparison("matched outputs", points, 1)]


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds outputs against naive-evict, and naive-evict's against the full cache."""
    table = Table(
        f"{model}: matched outputs",
        [
            "numbers, policy, variant",
            "against",
            "outputs",
            "equal, token by token",
            "ROUGE-L mean",
            f"pairs >= {1 - SAME}",
            "length ratio, median",
            "relocations, all read back",
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
                _row(result, table, model, chosen[0], against[0], name)
    result.tables.append(table)


def _row(result: Result, table: Table, model: str, one: Run, other: Run, against: str) -> None:
    pairs = list(zip(one.figures["output_ids"], other.figures["output_ids"], strict=True))
    rouge = [rouge_l(mine, theirs) for mine, theirs in pairs]
    lengths = [len(mine) / len(theirs) for mine, theirs in pairs if theirs]
    equal = sum(mine == theirs for mine, theirs in pairs)
    near = sum(value >= 1 - SAME for value in rouge)
    name = ", ".join(str(one.labels[key]) for key in ("dtype", "policy", "variant"))
    verified = figures([one], "verified_relocations").median
    table.rows.append(
        [
            name,
            against,
            len(pairs),
            equal,
            sum(rouge) / len(rouge),
            f"{100 * near / len(pairs):.1f}%",
            spread(lengths).median,
            int(verified),
        ]
    )
    if against == NAIVE:
        result.claims += [
            spread([100 * near / len(pairs)]).claim(
                "Table 2",
                f"outputs within {SAME} of naive-evict's, {name}",
                model,
                "%",
                PAPER_ROUGE,
            ),
            spread([spread(lengths).median]).claim(
                "Table 2", f"length against naive-evict, {name}", model, "x", PAPER_LENGTH
            ),
            spread([verified]).claim(
                "I1, I2", f"relocations read back and equal, {name}", model, "relocations", "all"
            ),
        ]


EXPERIMENT = Experiment(
    "stability",
    "outputs of vToken against naive-evict's; every relocation read back",
    "section 5.8, table 2",
    comparisons,
    report,
)
