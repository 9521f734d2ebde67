"""What is fixed at start-up: vToken's part of vLLM's `additional_config`, validated as a whole."""

from __future__ import annotations

from typing import Any

import msgspec

from vtoken.config.values import VTokenConfig, default_config, merge_patch
from vtoken.errors import RefusedError, UnsupportedError
from vtoken.wire import Geometry, VerifyRatio

KEY = "vtoken"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`config`: the initial configuration as a merge patch over the defaults.

    `verify_ratio`: initial share of relocations whose contents are hashed before and after (I1).
    `strict`: stop the engine on a violation. `check_every_step`: recompute all invariants.
    `experimental_cuda`: serve on CUDA, which has never been run (docs/gpu.md). `copy_sync`: on
    CUDA, the host waits for every relocation; an ablation, slower and no safer. `api`: for the API
    server, which reads it itself (`vtoken_api.settings`); it names files, never secrets.
    `calibration`: the file of the model's calibration profile; "": the one in the user's cache, if
    there is one; "off": none. `chat_template`: what the API server was given as `--chat-template`,
    by which parts of prompts are found; "": the tokenizer's own.
    """

    config: dict[str, Any] = {}
    verify_ratio: VerifyRatio = 0.0
    strict: bool = True
    check_every_step: bool = False
    telemetry_hz: float = 20.0
    experimental_cuda: bool = False
    copy_sync: bool = False
    calibration: str = ""
    chat_template: str = ""
    api: dict[str, Any] = {}


def read_settings(additional_config: dict[str, Any]) -> Settings:
    """The settings in vLLM's `additional_config`; raises UnsupportedError naming what is wrong."""
    try:
        return msgspec.convert(additional_config.get(KEY, {}), Settings, strict=False)
    except msgspec.ValidationError as error:
        raise UnsupportedError(f"additional_config[{KEY!r}]: {error}") from None


def initial_config(settings: Settings, geometry: Geometry) -> VTokenConfig:
    """The configuration to start with; raises UnsupportedError naming field, value and bound."""
    try:
        return merge_patch(
            default_config(geometry.num_blocks),
            {"verify_ratio": settings.verify_ratio, **settings.config},
            num_blocks=geometry.num_blocks,
            num_layers=geometry.num_layers,
            num_heads=geometry.num_heads,
        )
    except RefusedError as error:
        raise UnsupportedError(f"initial configuration: {error.detail} ({error.bound})") from None
