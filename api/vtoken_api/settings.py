"""The API server's settings: the part `api` of vToken's `additional_config`.

Settings name token files and never contain tokens, because logs and command lines show them.
"""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

import msgspec

SHARED_FOLDER = "VTOKEN_API_FOLDER"  # in the environment; `vtoken.vllm.launch` sets it


class ApiSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty string is unset. `show_text`: whether the text of requests may be read."""

    read_token_file: str = ""
    control_token_file: str = ""
    state_dir: str = ""  # empty: `statedir.default_path`
    show_text: bool = False


def api_settings(args: Namespace) -> ApiSettings:
    """The settings in vLLM's server arguments; raises ValueError naming what is wrong."""
    vtoken = (getattr(args, "additional_config", None) or {}).get("vtoken", {})
    try:
        return msgspec.convert(vtoken.get("api", {}), ApiSettings)
    except msgspec.ValidationError as error:
        raise ValueError(f"additional_config['vtoken']['api']: {error}") from None


def shared_folder(args: Namespace) -> Path | None:
    """The folder of a server with several API processes, None with one; raises ValueError."""
    if (getattr(args, "api_server_count", None) or 1) == 1:
        return None
    folder = os.environ.get(SHARED_FOLDER)
    if not folder:
        raise ValueError(
            f"several API processes need {SHARED_FOLDER}, a new private folder that all of them "
            "share; `vtoken serve` makes it"
        )
    return Path(folder)
