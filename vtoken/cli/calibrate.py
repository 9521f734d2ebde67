"""`vtoken calibrate MODEL`: which layers and heads of MODEL rank tokens best.

Inserts needles into real prose, measures the attention of every layer, and writes a profile that
`vtoken serve MODEL` loads automatically (docs/calibration.md).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from vtoken.base.errors import ProfileError
from vtoken.cli.printing import print_json, print_text, table
from vtoken.core.config.calibration import CalibrationProfile

MIN_PROMPTS, MAX_PROMPTS = 16, 1000
FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # the files of a model


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vtoken calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a Hugging Face model id or folder, as `serve` takes it")
    add(
        "--prompts",
        type=_num_prompts,
        default=48,
        metavar="N",
        help="prompts with a needle: half to choose layers and heads, half to report recall (48)",
    )
    add("--tokens", type=int, default=900, metavar="N", help="length of a prompt (900)")
    add("--device", default="cpu", help="cpu, cuda or cuda:N (cpu)")
    add(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="type of the weights (auto: the model's own)",
    )
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="the profile (default: in $XDG_CACHE_HOME/vtoken/calibration, where `serve` finds it)",
    )
    add("--json", action="store_true", help="print the profile as JSON instead of a table")
    return parser


def _num_prompts(text: str) -> int:
    number = int(text) if text.isdigit() else 0
    if number % 2 or not MIN_PROMPTS <= number <= MAX_PROMPTS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an even number in {MIN_PROMPTS}..{MAX_PROMPTS}"
        )
    return number


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    try:
        profile, path = calibrate(args)
    except ProfileError as error:
        print(f"vtoken calibrate: {error}", file=sys.stderr)
        return 1
    if args.json:
        print_json(profile)
    else:
        for line in lines(profile):
            print_text(line)
        print_text(f"written to {path}")
    return 0


def calibrate(args: argparse.Namespace) -> tuple[CalibrationProfile, Path]:
    """Measure and write the profile; raises ProfileError."""
    from transformers import AutoTokenizer

    from vtoken.calibration import store
    from vtoken.calibration.measure import measure
    from vtoken.calibration.model_files import fingerprint
    from vtoken.calibration.observe import Observer
    from vtoken.calibration.prompts import needle_prompts

    started = time.monotonic()
    folder = _download(args.model)
    weights = fingerprint(folder)
    path = args.output or store.default_path(weights)
    store.require_writable(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ProfileError(f"no tokenizer in {folder}: {error}") from None
    prompts = needle_prompts(tokenizer, args.prompts, args.tokens)
    observer = Observer(folder, device=args.device, dtype=args.dtype)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if observer.max_tokens is not None and longest > observer.max_tokens:
        raise ProfileError(
            f"--tokens = {args.tokens} makes prompts of {longest} tokens; "
            f"{args.model} takes at most {observer.max_tokens}: choose fewer"
        )
    profile = measure(
        observer, prompts, model=args.model, fingerprint=weights, progress=_Progress(args.prompts)
    )
    store.write(profile, path)
    _log(f"done in {time.monotonic() - started:.0f} s")
    return profile, path


def _download(model: str) -> Path:
    """The model's folder, downloaded if it is a hub id; raises ProfileError."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=FILES))
    except (OSError, ValueError) as error:
        raise ProfileError(
            f"{model} is not a folder and cannot be downloaded from the hub: {error}"
        ) from None


class _Progress:
    """Progress on stderr: a line every 8 prompts, or one line that is overwritten on a terminal."""

    def __init__(self, num_prompts: int) -> None:
        self._num_prompts = num_prompts
        self._started = time.monotonic()

    def __call__(self, done: int) -> None:
        left = (time.monotonic() - self._started) / done * (self._num_prompts - done)
        text = f"prompt {done} of {self._num_prompts}, {left:.0f} s left"
        if sys.stderr.isatty():
            last = "\n" if done == self._num_prompts else ""
            print(f"\rcalibrate: {text:<40}", end=last, file=sys.stderr, flush=True)
        elif done % 8 == 0:
            _log(text)


def _log(text: str) -> None:
    print(f"calibrate: {text}", file=sys.stderr, flush=True)


def lines(profile: CalibrationProfile) -> list[str]:
    """The profile as a table, with a line for each signal and each policy."""
    first: Any = next(iter(profile.signals.values())).recall
    rows = [["SIGNAL, POLICY", "LAYERS", "HEADS", *(f"KEEP {found.keep:g}" for found in first)]]
    for kind, found in profile.signals.items():
        layers = ", ".join(map(str, found.layers)) or "default depth"
        heads = ", ".join(map(str, found.heads)) or "all"
        rows.append([kind, layers, heads, *(f"{of.recall:.2f}" for of in found.recall)])
    for name, policy in profile.policies.items():
        recalls = {of.keep: f"{of.recall:.2f}" for of in policy}
        rows.append([name, "", "", *(recalls.get(of.keep, "-") for of in first)])
    return [
        f"{profile.model}: share of {first[0].samples} needles that are complete among the best "
        "KEEP of all tokens, or after eviction by a policy that keeps as many",
        *table(rows),
    ]
