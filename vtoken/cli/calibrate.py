"""`vtoken calibrate MODEL`: which layers and heads of MODEL rank tokens best.

Inserts needles into real prose, measures the attention of every layer, and writes a profile that
`vtoken serve MODEL` loads automatically (docs/calibration.md).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from vtoken.base.errors import ProfileError
from vtoken.cli.errors import CommandError, engine_modules
from vtoken.cli.printing import Part, Printer, Table
from vtoken.core.config.calibration import CalibrationProfile

FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # the files of a model


def calibrate(as_json: bool, output: str | None, **how: Any) -> None:
    """Measure a model, and write and print its profile."""
    out = Printer(as_json=as_json)
    try:
        with engine_modules():
            profile, path = measured(output=None if output is None else Path(output), **how)
    except ProfileError as error:
        raise CommandError(str(error)) from error
    out.show(profile, parts)
    if not as_json:
        out.part(f"written to {path}")


def measured(
    model: str, num_prompts: int, num_tokens: int, device: str, dtype: str, output: Path | None
) -> tuple[CalibrationProfile, Path]:
    """Measure and write the profile; raises ProfileError."""
    from transformers import AutoTokenizer

    from vtoken.calibration import store
    from vtoken.calibration.measure import measure
    from vtoken.calibration.model_files import fingerprint
    from vtoken.calibration.observe import Observer
    from vtoken.calibration.prompts import needle_prompts

    folder = _download(model)
    weights = fingerprint(folder)
    path = output or store.default_path(weights)
    store.require_writable(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ProfileError(f"no tokenizer in {folder}: {error}") from None
    prompts = needle_prompts(tokenizer, num_prompts, num_tokens)
    observer = Observer(folder, device=device, dtype=dtype)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if observer.max_tokens is not None and longest > observer.max_tokens:
        raise ProfileError(
            f"--tokens = {num_tokens} makes prompts of {longest} tokens; "
            f"{model} takes at most {observer.max_tokens}: choose fewer"
        )
    with click.progressbar(length=num_prompts, label="calibrate", file=sys.stderr) as bar:
        profile = measure(
            observer,
            prompts,
            model=model,
            fingerprint=weights,
            progress=lambda num_done: bar.update(num_done - bar.pos),
        )
    store.write(profile, path)
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


def parts(profile: CalibrationProfile) -> list[Part]:
    """The profile as a table, with a line for each signal and each policy."""
    first: Any = next(iter(profile.signals.values())).recall
    head = ["SIGNAL, POLICY", "LAYERS", "HEADS", *(f"KEEP {found.keep:g}" for found in first)]
    rows = []
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
        Table(rows, head),
    ]
