"""Shared prefixes: what eviction and reclamation do beside vLLM's prefix cache (paper, table 4).

Groups of requests share half of their prompt. Both variants have prefix caching on, so a difference
comes from reclaiming, not from hits. A tier of `prefix_sharing` is a row of its own.
"""

from __future__ import annotations

import random
import sys
from typing import Any

from vtoken.bench.engines import prompt
from vtoken.bench.output import Table
from vtoken.bench.variants import SAMPLE_EVERY, VARIANTS, find, request, start

PAPER = {1: "28.6%", 2: "33.0%", 4: "32.3%", 8: "42.2%"}
PREFIX_TOKENS, SUFFIX_TOKENS, NEW_TOKENS, PREFIX_REQUESTS = 512, 512, 256, 8


def _prefix_requests(degree: int) -> list[dict[str, Any]]:
    """Groups of `degree` requests share a prefix, each with a suffix of its own."""
    rng = random.Random(degree)
    out = []
    for number in range(PREFIX_REQUESTS):
        if number % degree == 0:
            prefix = prompt(rng, PREFIX_TOKENS)
        out.append(request(prefix + prompt(rng, SUFFIX_TOKENS), NEW_TOKENS, evicting=True))
    return out


def measure(*, quick: bool) -> list[dict[str, Any]]:
    """A row for each variant, tier and sharing degree."""
    degrees = (1, 4) if quick else (1, 2, 4, 8)
    rows: list[dict[str, Any]] = []
    variants = {"naive-evict": VARIANTS["naive-evict"], "vToken": VARIANTS["vToken, eager plug"]}
    for variant, config in variants.items():
        engine = start(f"{variant}, prefix caching", config, 1024, enable_prefix_caching=True)
        tiers: list[str | None] = [None]
        if variant == "vToken" and "prefix_sharing" in engine.facts["fields"]:
            tiers = ["skip", "index", "copy"]
        try:
            for tier in tiers:
                for degree in degrees:
                    patch: dict[str, Any] = {"policy": {"name": "h2o"}}
                    if tier is not None:
                        patch["prefix_sharing"] = tier
                    answer = engine.ask(
                        {
                            "requests": _prefix_requests(degree),
                            "config": patch,
                            "gaps": True,
                            "sample_every": SAMPLE_EVERY,
                        }
                    )
                    answer.pop("steps_ms")
                    name = variant if tier is None else f"{variant}, {tier}"
                    rows.append({"degree": degree, "variant": name} | answer)
                    print(f"{name}, degree {degree}", file=sys.stderr, flush=True)
        finally:
            engine.close()
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """Blocks, speed and tokens against naive-evict of the same degree."""
    out = Table(
        f"Shared prefixes: {PREFIX_REQUESTS} requests of {PREFIX_TOKENS} shared + {SUFFIX_TOKENS} "
        f"own + {NEW_TOKENS} new tokens, h2o, prefix caching on",
        [
            "degree, variant",
            "used blocks",
            "vs naive",
            "paper",
            "F",
            "shared skipped",
            "tok/s vs naive",
            "p95 vs naive",
            "tokens = naive",
        ],
        [],
        ["used blocks: of the whole pool, a shared block counts once"],
    )
    for row in sorted(rows, key=lambda r: r["degree"]):
        memory, naive = row["memory"], find(rows, row, "naive-evict")
        assert naive is not None
        cells: list[str | None] = [None] * 4
        if row is not naive:
            speed = row["tokens"] / row["seconds"] / (naive["tokens"] / naive["seconds"])
            cells = [
                f"{memory['used_blocks'] / naive['memory']['used_blocks'] - 1:+.1%}",
                f"-{PAPER[row['degree']]}",
                f"{speed - 1:+.1%}",
                f"{row['gap_p95_ms'] / naive['gap_p95_ms'] - 1:+.1%}",
            ]
        equal = "yes" if row["tokens_hash"] == naive["tokens_hash"] else "no"
        out.rows.append(
            [
                f"{row['degree']}, {row['variant']}",
                memory["used_blocks"],
                cells[0],
                cells[1],
                f"{memory['f']:.1%}",
                row.get("shared_skipped_blocks"),
                cells[2],
                cells[3],
                equal,
            ]
        )
    return out
