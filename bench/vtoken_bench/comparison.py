"""Check whether a new run reproduces the claims of an old one: `vtoken bench compare OLD NEW`.

A claim is reproduced when its range [low, high] overlaps the old one, in the same unit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from vtoken_bench.claims import Claim
from vtoken_bench.output import Result, Table, as_text, read

SUMMARY = "list which claims of OLD are reproduced in NEW; exit code 1 if any differs"
Key = tuple[str, str, str]


def claims_of(path: Path) -> dict[Key, Claim]:
    """Claims of a JSON file, or of all JSON files of a folder, by row, what and model.

    Raises ValueError if two claims have the same key.
    """
    found: dict[Key, Claim] = {}
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        for claim in read(file).claims:
            key = (claim.row, claim.what, claim.model)
            if key in found:
                raise ValueError(f"{file}: duplicate claim {', '.join(key)}")
            found[key] = claim
    return found


def reproduced(old: Claim, new: Claim) -> bool:
    return old.unit == new.unit and old.low <= new.high and new.low <= old.high


def compared(old: dict[Key, Claim], new: dict[Key, Claim]) -> Table:
    """One row per claim; claims of both runs come first."""
    table = Table("Claims", ["row, what", "model", "old", "new", ""], [])
    for key in sorted({**old, **new}, key=lambda key: (key not in old or key not in new, key)):
        before, after = old.get(key), new.get(key)
        if before is None or after is None:
            verdict = "only in old" if after is None else "only in new"
        else:
            verdict = "reproduced" if reproduced(before, after) else "differs"
        row, what, model = key
        table.rows.append([f"{row}: {what}", model, _shown(before), _shown(after), verdict])
    shared = [key for key in old if key in new]
    if shared:
        count = sum(reproduced(old[key], new[key]) for key in shared)
        table.notes.append(f"{count} of {len(shared)} claims are reproduced")
    return table


def _shown(claim: Claim | None) -> str:
    if claim is None:
        return ""
    return f"{claim.value:.4g} [{claim.low:.4g} .. {claim.high:.4g}] {claim.unit}".rstrip()


def run(args: argparse.Namespace) -> int:
    """Return 0 if all shared claims are reproduced, 1 if one differs, 2 if none is shared."""
    try:
        old, new = claims_of(args.old), claims_of(args.new)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        print(f"vtoken bench compare: {error}", file=sys.stderr)
        return 2
    table = compared(old, new)
    print(as_text(Result("compare", "", {}, [table])).strip())
    if not old.keys() & new.keys():
        print("vtoken bench compare: OLD and NEW share no claim", file=sys.stderr)
        return 2
    return int(any(row[-1] == "differs" for row in table.rows))
