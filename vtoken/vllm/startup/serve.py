"""`vtoken serve MODEL`: vLLM's own OpenAI server with the plugin on.

Every vLLM flag passes through; only `--vtoken-*` flags are read here. The process is replaced by
vLLM's server, so signals, exit codes and logs are its own.
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

from vtoken.bounds import bounds_of, read_json, span
from vtoken.calibration import store
from vtoken.config.values import VTokenConfig
from vtoken.credentials import CredentialError, read_token_file
from vtoken.errors import ProfileError, RefusedError
from vtoken.policies import make_policy
from vtoken.vllm import engine_args
from vtoken.vllm.startup import startup_error
from vtoken.vllm.startup.calibration import OFF
from vtoken.vllm.startup.model_argument import flag_values, take_model
from vtoken.wire import Bound, ConfigValues, pool_limits

PLUGIN = "vtoken"
PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)
# What vLLM's entry point parses and then passes over: it always starts one API process.
NOT_HERE = {
    "--api-server-count": "one API process serves the engine; start it with 1, or without the flag",
    "--headless": "there would be no API server",
    "--grpc": "/vtoken/v1 is served over HTTP only",
}
OURS = ("--scheduler-cls", "--worker-cls", "--additional-config")


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
        "a Hugging Face model id or folder, best in front of all flags: elsewhere, vLLM is "
        "imported to learn which of its flags take a value, which takes some seconds",
    )
    add = parser.add_argument_group("vToken, initial values; all can be changed live").add_argument
    add("--vtoken-policy", metavar="NAME", help="eviction policy (default: none)")
    add("--vtoken-policy-params", metavar="JSON", help="its parameters, a JSON object")
    _add_settings(add)
    trust = parser.add_argument_group("vToken, fixed for the server's life").add_argument
    trust(
        "--vtoken-check-every-step",
        action="store_true",
        help="recompute all tables and counts in every step: for soaks, not for serving",
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
        help="serve on CUDA: written and tested up to the device calls, never run on a GPU",
    )
    trust(
        "--vtoken-copy-sync",
        action="store_true",
        help="CUDA: wait on the host for every relocation (an ablation)",
    )
    trust(
        "--vtoken-calibration",
        metavar="FILE|off",
        help="the model's calibration profile, see `vtoken calibrate` (default: the one that it "
        "wrote, if there is one); off: a layer at 0.7 of the depth, for key norms at 0.6",
    )
    access = parser.add_argument_group("vToken, who may do what (docs/security.md)").add_argument
    access(
        "--vtoken-read-token-file",
        metavar="FILE",
        help="reading needs the token in FILE, or a stronger one",
    )
    access(
        "--vtoken-control-token-file",
        metavar="FILE",
        help="changing needs the token in FILE; needed to change anything beyond loopback",
    )
    access(
        "--vtoken-show-text",
        action="store_true",
        help="the text of running requests may be read, by those who may change things",
    )
    access(
        "--vtoken-state-dir",
        metavar="DIR",
        help="audit log and flight recorder (default: $XDG_STATE_HOME/vtoken/PORT)",
    )
    parser.add_argument(
        "--logits-processors", nargs="+", default=[], metavar="CLASS", help="beside vToken's own"
    )
    return parser


def plain_settings() -> dict[str, Bound]:
    """The settings that one flag says; a policy takes two, and some take none."""
    return {name: b for name, b in bounds_of(ConfigValues).items() if b.type != "object"}


def displayed(value: Any) -> str:
    return "on" if value is True else f"{value}"


def flag_of(setting: str) -> str:
    return f"--vtoken-{setting.replace('_', '-')}"


def _add_settings(add: Callable[..., Any]) -> None:
    """A flag for each of the plain settings, from its declaration."""
    by_pool = pool_limits(1)
    defaults = structs.asdict(VTokenConfig())
    for name, bound in plain_settings().items():
        default = "depends on the pool" if name in by_pool else displayed(defaults[name])
        limits = f", {span(bound)}" if bound.type == "float" else ""
        about = f"{bound.summary}{limits} (default: {default})".replace("%", "%%")
        if bound.type == "bool":
            add(flag_of(name), action=argparse.BooleanOptionalAction, default=None, help=about)
        elif bound.type == "enum":
            add(flag_of(name), choices=bound.choices, help=about)
        elif bound.type == "float":
            add(flag_of(name), type=float, metavar="X", help=about)
        else:
            add(flag_of(name), type=int, metavar="N", help=about)


def initial_patch(args: argparse.Namespace) -> dict[str, Any]:
    """The `--vtoken-*` values as a merge patch; raises ValueError for malformed parameters."""
    patch: dict[str, Any] = {}
    if args.vtoken_policy is not None:
        params = read_json(args.vtoken_policy_params or "{}")
        make_policy(args.vtoken_policy, params)
        patch["policy"] = {"name": args.vtoken_policy, "params": params}
    elif args.vtoken_policy_params is not None:
        raise ValueError("--vtoken-policy-params needs --vtoken-policy")
    for name in plain_settings():
        value = getattr(args, f"vtoken_{name}")
        if value is not None:
            patch[name] = value
    return patch


def api_part(args: argparse.Namespace) -> dict[str, Any]:
    """What the API server is told, checked here too, so that a bad file fails before the model
    loads; raises CredentialError."""
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


def calibration_part(choice: str | None) -> dict[str, Any]:
    """The setting `calibration`; a bad file fails here, before the model loads: ProfileError."""
    if choice is None or choice == OFF:
        return {} if choice is None else {"calibration": OFF}
    store.read(Path(choice))
    return {"calibration": str(Path(choice).absolute())}


def chat_template_part(flags: list[str]) -> dict[str, str]:
    """The setting `chat_template`: vLLM keeps its flag to the API server."""
    given = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    given.add_argument("--chat-template", "--chat_template")
    template: str | None = given.parse_known_args(flags)[0].chat_template
    return {} if template is None else {"chat_template": template}


def asked_elsewhere(flags: list[str]) -> dict[str, str]:
    """Which of `flags` vLLM would pass over in silence, and why each is refused."""
    found = {}
    for place, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        name = "--api-server-count" if name == "-asc" else name.replace("_", "-")
        if name == "--api-server-count":
            value = value if equals else next(iter(flags[place + 1 : place + 2]), "")
        if name in NOT_HERE and value != "1":
            found[name] = NOT_HERE[name]
    return found


def server_command(argv: list[str]) -> list[str]:
    """The command line of vLLM's server; exits with 2 and a message on bad arguments."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    for flag in rest:
        name = flag.split("=")[0].replace("_", "-")
        if name.startswith("--vtoken"):
            parser.error(f"unknown flag {flag}")
        if name in OURS:
            parser.error(f"{name} is set by vtoken serve and cannot be passed")
    for name, why in asked_elsewhere(rest).items():
        parser.error(f"{name} is not supported: {why}")
    try:
        model, rest = take_model(rest, flag_values)
        if model is None and not any(f.split("=")[0] == "--model" for f in rest):
            parser.error("MODEL is missing")
        patch = initial_patch(args)
        api = api_part(args)
        calibration = calibration_part(args.vtoken_calibration)
    except (CredentialError, ProfileError) as error:
        parser.error(str(error))
    except RefusedError as error:
        parser.error(f"{error.field}: {error.detail} (allowed: {error.bound})")
    except ValueError as error:
        parser.error(str(error))
    settings: dict[str, Any] = {
        "strict": args.vtoken_strict,
        "check_every_step": args.vtoken_check_every_step,
        **calibration,
        **chat_template_part(rest),
    }
    if args.vtoken_experimental_cuda:
        settings |= {"experimental_cuda": True, "copy_sync": args.vtoken_copy_sync}
    elif args.vtoken_copy_sync:
        parser.error("--vtoken-copy-sync needs --vtoken-experimental-cuda")
    if api:
        settings["api"] = api
    engine = engine_args(patch, **settings)
    if not any(flag.split("=")[0] in ("--host", "--uds") for flag in rest):
        rest += ["--host", "127.0.0.1"]  # vLLM's own default is every interface
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *([] if model is None else ["--model", model]),
        *rest,
        "--scheduler-cls",
        engine["scheduler_cls"],
        "--worker-cls",
        engine["worker_cls"],
        "--additional-config",
        json.dumps(engine["additional_config"]),
        "--logits-processors",
        *args.logits_processors,
        *engine["logits_processors"],
    ]


def plugin_names() -> str:
    """`VLLM_PLUGINS` with ours in it. Endpoint plugins load only when named there, and naming one
    filters the others, so that everything that would have loaded is named too."""
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None:
        names = [name for name in chosen.split(",") if name]
    else:
        names = [plugin.name for group in PLUGIN_GROUPS for plugin in entry_points(group=group)]
    return ",".join(dict.fromkeys([*names, PLUGIN]))


def main(argv: list[str]) -> int:
    command = server_command(argv)
    os.environ["VLLM_PLUGINS"] = plugin_names()
    startup_error.offer()
    os.execv(command[0], command)
