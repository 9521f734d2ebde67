"""`vtoken bench report`: one Markdown file with all results of the last runs and their setups.

It is for benchmarks on rented machines; `vtoken bench results` writes the pages of docs/.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from vtoken_bench.claims import claims_table
from vtoken_bench.output import Result, as_markdown


def read_results(folder: Path) -> dict[str, Result]:
    """The results in `folder` by file stem, in order of their start."""
    found = {}
    for path in folder.glob("*.json"):
        try:
            found[path.stem] = msgspec.json.decode(path.read_bytes(), type=Result)
        except msgspec.MsgspecError:
            continue  # another file of a benchmark
    return dict(sorted(found.items(), key=lambda pair: pair[1].started))


def as_report(results: dict[str, Result]) -> str:
    lines = ["# vToken: benchmark results of this machine"]
    claims = [(claim, r.command) for r in results.values() for claim in r.claims]
    if claims:
        lines += ["", claims_table(claims)]
    for name, result in results.items():
        lines += ["", f"## {name}", "", as_markdown(result)]
    return "\n".join(lines) + "\n"
