"""The interfaces that start a server. Only its first process uses and imports them."""

from __future__ import annotations

from vtoken.vllm.touchpoints.touchpoint import points_at

_calls = points_at("vllm.", "call", device="server")
_ARGUMENTS = (  # bound, vLLM's module of arguments, and where `cli_env_setup` is
    ({"until": "0.33"}, "launchers.cli_args", "serve.utils.api_utils"),
    ({"since": "0.33"}, "common.cli_args", "common.startup"),
)

SERVER_POINTS = (
    _calls(
        "entrypoints.cli.serve:ServeSubcommand.cmd(args)",
        "start the server in as many API processes as it is told to",
        ends_with="vLLM's command runs without a package named vllm",
    ),
    *(
        point
        for versions, arguments, startup in _ARGUMENTS
        for point in (
            _calls(
                f"entrypoints.{arguments}:make_arg_parser(parser)",
                "parse the server's arguments",
                **versions,
            ),
            _calls(
                f"entrypoints.{arguments}:validate_parsed_serve_args(args)",
                "check the server's arguments as vLLM's command does",
                **versions,
            ),
            _calls(
                f"entrypoints.{startup}:cli_env_setup",
                "set vLLM's default start method of processes as vLLM's command does",
                **versions,
            ),
        )
    ),
    _calls("logger:configure_logging_from_args(args)", "set up logging as vLLM's command does"),
)
