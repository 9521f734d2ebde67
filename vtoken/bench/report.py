"""`vtoken bench report`: one Markdown file with everything that the last runs left.

For whoever ran benchmarks on a machine that is gone tomorrow: the figures, and what each was
measured on. The pages of docs/ are written by `vtoken bench results`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from vtoken.bench.output import Result, as_markdown, claims_table


def read_results(folder: Path) -> dict[str, Result]:
    """By file name without its end, the results in `folder`, in the order in which they began."""
    found = {}
    for path in folder.glob("*.json"):
        try:
            found[path.stem] = msgspec.json.decode(path.read_bytes(), type=Result)
        except msgspec.MsgspecError:
            continue  # something else that a benchmark keeps there
    return dict(sorted(found.items(), key=lambda pair: pair[1].started))


def as_report(results: dict[str, Result]) -> str:
    lines = ["# vToken: what the benchmarks found on this machine"]
    if any(result.claims for result in results.values()):
        lines += ["", claims_table(results.values())]
    for name, result in results.items():
        lines += ["", f"## {name}", "", as_markdown(result)]
    return "\n".join(lines) + "\n"
