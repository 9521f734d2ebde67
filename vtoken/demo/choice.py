"""Chooses the demo's model (named by the user, trained, random) and the flags of `vtoken serve`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path

from vtoken.demo import sizing
from vtoken.demo.trained_model import MODEL_NAME, TrainedModelError, fetch

FLAGS = (
    "--vtoken-budget-tokens=256",
    "--vtoken-interval-tokens=64",
    "--vtoken-theta-f=0.15",
    "--vtoken-show-text",  # all clients are the demo's own
    "--enforce-eager",
    "--max-num-seqs=32",
)


# Engines of one machine's cores. vLLM would pin all of them to the same ones.
SHARED_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Choice:
    """The model, flags and environment of `vtoken serve`."""

    model: str
    flags: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def choose(
    model: str | None, out: Path, server_flags: Sequence[str], num_engines: int = 1
) -> Choice:
    """The given model, else the trained one, else (without a network) a random one made in `out`.

    With `num_engines`, data-parallel engines serve it, each with a cache of its own.
    """
    found = _choose(model, out, server_flags, num_engines)
    if num_engines == 1:
        return found
    flags = [*found.flags, f"--data-parallel-size={num_engines}"]
    shared = SHARED_CORES if serves_on_cpu() else {}
    return replace(found, flags=flags, environment={**shared, **found.environment})


def _choose(model: str | None, out: Path, server_flags: Sequence[str], num_engines: int) -> Choice:
    """The choice for one engine of `num_engines`.

    `server_flags` are the user's flags, which follow these. `--dtype` among them sets the size of
    the cache, and `--vtoken-policy` replaces the demo's policy.
    Raises DemoError if the model cannot be read or does not fit.
    """
    dtype = _flag_value(server_flags, "--dtype") or _served_dtype()
    named = _flag_value(server_flags, "--vtoken-policy")
    policy = [] if named else ["--vtoken-policy=auto"]
    if model is not None:
        _log(f"sizing the cache of {model}")
        config = sizing.read_config(model)
        size = sizing.fit(
            model,
            sizing.geometry(config),
            dtype,
            _share(sizing.available_bytes(), num_engines) if serves_on_cpu() else None,
            sizing.count_parameters(config),
            num_engines,
        )
        _announce(model, size)
        return Choice(model, [*_flags(size), *policy])
    try:
        folder, name = fetch(), MODEL_NAME
    except TrainedModelError as error:
        from vtoken.demo.model import build

        _log(f"{error}; using a small random model instead, whose answers are meaningless")
        folder, name = build(out / "model"), "random"
    geometry = sizing.geometry(sizing.own_config(folder))
    size = sizing.Size(geometry, dtype, sizing.num_blocks_of(num_engines))
    _announce(name, size)
    return Choice(
        str(folder),
        [*_flags(size), *policy, f"--served-model-name={name}"],
        {"HF_HUB_OFFLINE": "1"},
    )


def _share(available: int | None, num_engines: int) -> int | None:
    return None if available is None else available // num_engines


def _announce(name: str, size: sizing.Size) -> None:
    _log(
        f"{name} in {size.dtype}, with {size.num_blocks} blocks of {sizing.BLOCK_SIZE} tokens, "
        f"{size.cache_bytes / 1e6:,.0f} MB"
    )


def _flags(size: sizing.Size) -> list[str]:
    # A high watermark makes reclamation start early, so that it is visible.
    return [*FLAGS, *size.flags(), f"--vtoken-low-watermark-blocks={size.num_blocks * 3 // 4}"]


def serves_on_cpu() -> bool:
    """Whether the CPU build of vLLM is installed."""
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


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
