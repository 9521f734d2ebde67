"""`vtoken serve MODEL`: vLLM's own OpenAI server with the vToken plugin.

Accepts every vLLM flag and adds the `--vtoken-*` flags below. The process becomes vLLM's server, so
signals, exit codes and logs are vLLM's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from msgspec import structs

from vtoken.base.credentials import CredentialError, read_token_file
from vtoken.base.errors import RefusedError
from vtoken.base.quantities import size_bytes
from vtoken.core.config.values import AUTO_PATCH, VTokenConfig
from vtoken.policies import make_policy
from vtoken.vllm import engine_args
from vtoken.vllm.startup import startup_error
from vtoken.wire import Bound, Configuration, Experiment, pool_limits
from vtoken.wire.bounds import bounds_of, read_json, span
from vtoken.wire.objectives import parse_objectives

PLUGIN = "vtoken"
PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)
RUST = "VLLM_USE_RUST_FRONTEND"
RESERVED_FLAGS = ("--scheduler-cls", "--worker-cls", "--additional-config")
AUTO = "auto"
AUTO_NOTE = (
    "vToken: --vtoken-policy auto is keydiff under pressure: while memory is short, a request may "
    "be cut down to half of its prompt's length (docs/pressure.md); what it gives is parked, and "
    "comes back (docs/parking.md)"
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vtoken serve",
        usage="vtoken serve MODEL [any vLLM server flag] [--vtoken-…]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument_group(
        "MODEL",
        "a Hugging Face model id or folder",
    )
    add = parser.add_argument_group("vToken, initial values that can change live").add_argument
    add("--vtoken-policy", metavar="NAME", help="eviction policy, or auto (default: none)")
    add("--vtoken-policy-params", metavar="JSON", help="the policy's parameters, a JSON object")
    _add_settings(add, plain_settings(), structs.asdict(VTokenConfig()))
    trust = parser.add_argument_group("vToken, fixed while the server runs").add_argument
    trust(
        "--vtoken-check-every-step",
        action="store_true",
        help="recompute all tables and counts in every step; for soak tests, not for serving",
    )
    trust(
        "--vtoken-strict",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="stop the engine when an invariant breaks",
    )
    trust(
        "--vtoken-experimental-cuda",
        action="store_true",
        help="serve on CUDA, which is experimental: docs/gpu.md says what has run on a GPU",
    )
    access = parser.add_argument_group("vToken, access control (docs/security.md)").add_argument
    access(
        "--vtoken-read-token-file",
        metavar="FILE",
        help="require the token in FILE, or the control token, to read",
    )
    access(
        "--vtoken-control-token-file",
        metavar="FILE",
        help="require the token in FILE to make changes; without it, only loopback may make them",
    )
    access(
        "--vtoken-show-text",
        action="store_true",
        help="let clients that may make changes read the text of running requests",
    )
    access(
        "--vtoken-state-dir",
        metavar="DIR",
        help="folder of audit log and flight recorder (default: $XDG_STATE_HOME/vtoken/PORT)",
    )
    experiment = parser.add_argument_group(
        "vToken, for experiments", "what the defaults are compared with; a server leaves them alone"
    ).add_argument
    _add_settings(experiment, bounds_of(Experiment), structs.asdict(Experiment()))
    experiment(
        "--vtoken-copy-sync",
        action="store_true",
        help="CUDA: make the host wait for every relocation; fixed while the server runs",
    )
    return parser


def plain_settings() -> dict[str, Bound]:
    """The settings that have one flag; a policy has two, and some settings have none."""
    return {name: b for name, b in bounds_of(Configuration).items() if b.type != "object"}


def displayed(value: Any) -> str:
    return "on" if value is True else f"{value}" or "none"


def flag_of(setting: str) -> str:
    return f"--vtoken-{setting.replace('_', '-')}"


def _add_settings(
    add: Callable[..., Any], settings: dict[str, Bound], defaults: dict[str, Any]
) -> None:
    """Add a flag for each of the plain `settings`, from its declaration."""
    by_pool = pool_limits(1)
    for name, bound in settings.items():
        default = "depends on the pool" if name in by_pool else displayed(defaults[name])
        limits = f", {span(bound)}" if bound.type == "float" else ""
        about = f"{bound.summary}{limits} (default: {default})".replace("%", "%%")
        if bound.type == "bool":
            add(flag_of(name), action=argparse.BooleanOptionalAction, default=None, help=about)
        elif bound.type == "enum":
            add(flag_of(name), choices=bound.choices, help=about)
        elif bound.type == "float":
            add(flag_of(name), type=float, metavar="X", help=about)
        elif bound.type == "str":
            add(flag_of(name), metavar="TEXT", help=about)
        elif name.endswith("_bytes"):
            add(flag_of(name), type=size_or_auto, metavar="SIZE|auto", help=about)
        else:
            add(flag_of(name), type=int, metavar="N", help=about)


def size_or_auto(text: str) -> int | str:
    """The bytes of a size; `auto` is resolved by the engine, which knows its cache."""
    try:
        return text if text == AUTO else size_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, or {AUTO}") from None


def initial_patch(args: argparse.Namespace) -> dict[str, Any]:
    """The `--vtoken-*` values as a merge patch; raises ValueError for malformed parameters."""
    patch: dict[str, Any] = {}
    if args.vtoken_policy == AUTO:
        if args.vtoken_policy_params is not None:
            raise ValueError("--vtoken-policy-params needs the name of a policy, not auto")
        patch |= AUTO_PATCH | {"park_bytes": AUTO}
        if args.vtoken_budget_tokens is not None:
            del patch["budget_ratio"]
    elif args.vtoken_policy is not None:
        params = read_json(args.vtoken_policy_params or "{}")
        make_policy(args.vtoken_policy, params)
        patch["policy"] = {"name": args.vtoken_policy, "params": params}
    elif args.vtoken_policy_params is not None:
        raise ValueError("--vtoken-policy-params needs --vtoken-policy")
    for name in plain_settings():
        value = getattr(args, f"vtoken_{name}")
        if value is not None:
            patch[name] = value
    parse_objectives(patch.get("slo", ""))
    chosen = {name: getattr(args, f"vtoken_{name}") for name in Experiment.__struct_fields__}
    if experiment := {name: value for name, value in chosen.items() if value is not None}:
        patch["experiment"] = experiment
    return patch


def api_part(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of the API server; a bad file raises CredentialError before the model loads."""
    part: dict[str, Any] = {}
    for name in ("read_token_file", "control_token_file", "state_dir"):
        path = getattr(args, f"vtoken_{name}")
        if path is not None:
            if name != "state_dir":
                read_token_file(path)
            part[name] = str(Path(path).absolute())
    if args.vtoken_show_text:
        part["show_text"] = True
    return part


def server_command(argv: list[str]) -> list[str]:
    """The command line of vLLM's server; exits with 2 and a message on bad arguments."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    for flag in rest:
        name = flag.split("=")[0].replace("_", "-")
        if name.startswith("--vtoken"):
            parser.error(f"unknown flag {flag}")
        if name in RESERVED_FLAGS:
            parser.error(f"{name} is set by vtoken serve and cannot be passed")
    if os.environ.get(RUST, "0") not in ("", "0"):
        parser.error(f"{RUST} is set: the Rust front end runs no Python plugin; unset it")
    if rest and rest[0].startswith(("/", "./", "../")) and not Path(rest[0]).exists():
        parser.error(f"MODEL: there is no {rest[0]}; name a folder, or a model of Hugging Face")
    try:
        patch = initial_patch(args)
        api = api_part(args)
    except RefusedError as error:
        parser.error(f"{error.field}: {error.detail} (allowed: {error.bound})")
    except (CredentialError, ValueError) as error:
        parser.error(str(error))
    settings: dict[str, Any] = {
        "strict": args.vtoken_strict,
        "check_every_step": args.vtoken_check_every_step,
    }
    if args.vtoken_experimental_cuda:
        settings["experimental_cuda"] = True
        if args.vtoken_copy_sync:
            settings["experiment"] = {"copy_sync": True}
    elif args.vtoken_copy_sync:
        parser.error("--vtoken-copy-sync needs --vtoken-experimental-cuda")
    if api:
        settings["api"] = api
    if args.vtoken_policy == AUTO:
        print(AUTO_NOTE, file=sys.stderr, flush=True)
    engine = engine_args(patch, **settings)
    return [
        sys.executable,
        "-m",
        "vtoken.vllm.launch",
        *rest,
        "--scheduler-cls",
        engine["scheduler_cls"],
        "--worker-cls",
        engine["worker_cls"],
        "--additional-config",
        json.dumps(engine["additional_config"]),
    ]


def plugin_names() -> str:
    """The value of `VLLM_PLUGINS` with vToken's plugin.

    Endpoint plugins load only when named there. Naming one disables all unnamed plugins, so every
    plugin that would load by default is named too.
    """
    current = os.environ.get("VLLM_PLUGINS")
    if current is not None:
        names = [name for name in current.split(",") if name]
    else:
        names = [plugin.name for group in PLUGIN_GROUPS for plugin in entry_points(group=group)]
    return ",".join(dict.fromkeys([*names, PLUGIN]))


def main(argv: list[str]) -> int:
    command = server_command(argv)
    os.environ["VLLM_PLUGINS"] = plugin_names()
    startup_error.offer()
    os.execv(command[0], command)
