"""Settings fixed at start-up: vToken's part of vLLM's `additional_config`."""

from __future__ import annotations

from typing import Any

import msgspec

from vtoken.base.errors import RefusedError, UnsupportedError
from vtoken.core.config.values import VTokenConfig, default_config, merge_patch
from vtoken.vllm.startup.host_memory import park_bytes
from vtoken.wire import Geometry

KEY = "vtoken"


class FixedExperiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `vtoken.wire.Experiment` is for, fixed at start-up.

    `copy_sync`: on CUDA, the host waits for every relocation; slower and no safer.
    """

    copy_sync: bool = False


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vToken's settings that cannot change while the engine runs.

    `config`: the initial configuration as a merge patch over the defaults. `strict`: stop the
    engine on a violation. `check_every_step`: recompute all invariants. `experimental_cuda`: serve
    on CUDA, which is experimental (docs/gpu.md). `api`: settings of the API server, which reads
    them (`vtoken_api.settings`); contains file names, never secrets. `chat_template`: the API
    server's `--chat-template`, used to find the parts of prompts; "": the tokenizer's own.
    `local_engines`: the engines of this server on this host, which share its memory.
    """

    config: dict[str, Any] = {}
    strict: bool = True
    check_every_step: bool = False
    experimental_cuda: bool = False
    chat_template: str = ""
    local_engines: int = 1
    api: dict[str, Any] = {}
    experiment: FixedExperiment = FixedExperiment()


def read_settings(additional_config: dict[str, Any]) -> Settings:
    """The settings in vLLM's `additional_config`; raises UnsupportedError for an invalid one."""
    try:
        return msgspec.convert(additional_config.get(KEY, {}), Settings, strict=False)
    except msgspec.ValidationError as error:
        raise UnsupportedError(f"additional_config[{KEY!r}]: {error}") from None


def initial_config(settings: Settings, geometry: Geometry) -> VTokenConfig:
    """The initial configuration; raises UnsupportedError that names field, value and bound.

    `park_bytes` may be text here: see `park_bytes`.
    """
    patch = dict(settings.config)
    if isinstance(choice := patch.get("park_bytes"), str):
        patch["park_bytes"] = park_bytes(choice, geometry, settings.local_engines)
    try:
        return merge_patch(
            default_config(geometry.num_blocks),
            patch,
            num_blocks=geometry.num_blocks,
            num_layers=geometry.num_layers,
            num_heads=geometry.num_heads,
        )
    except RefusedError as error:
        raise UnsupportedError(f"initial configuration: {error.detail} ({error.bound})") from None
