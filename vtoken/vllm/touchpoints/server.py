"""The interfaces that start a server. Only its first process uses and imports them."""

from __future__ import annotations

from vtoken.vllm.touchpoints.touchpoint import TouchPoint

_ARGUMENTS = (  # since, until, vLLM's module of arguments, and where `cli_env_setup` is
    ("", "0.33", "launchers.cli_args", "serve.utils.api_utils"),
    ("0.33", "", "common.cli_args", "common.startup"),
)

SERVER_POINTS = (
    TouchPoint(
        "vllm.entrypoints.cli.serve:ServeSubcommand.cmd",
        "call",
        "start the server in as many API processes as it is told to",
        ("args",),
        ends_with="vLLM's command runs without a package named vllm",
        device="server",
    ),
    *(
        point
        for since, until, arguments, startup in _ARGUMENTS
        for point in (
            TouchPoint(
                f"vllm.entrypoints.{arguments}:make_arg_parser",
                "call",
                "parse the server's arguments; tell which flags take values",
                ("parser",),
                device="server",
                since=since,
                until=until,
            ),
            TouchPoint(
                f"vllm.entrypoints.{arguments}:validate_parsed_serve_args",
                "call",
                "check the server's arguments as vLLM's command does",
                ("args",),
                device="server",
                since=since,
                until=until,
            ),
            TouchPoint(
                f"vllm.entrypoints.{startup}:cli_env_setup",
                "call",
                "set vLLM's default start method of processes as vLLM's command does",
                device="server",
                since=since,
                until=until,
            ),
        )
    ),
    TouchPoint(
        "vllm.logger:configure_logging_from_args",
        "call",
        "set up logging as vLLM's command does",
        ("args",),
        device="server",
    ),
)
