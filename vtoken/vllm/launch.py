"""`python -m vtoken.vllm.launch`: vLLM's own server, in as many API processes as it is told to.

vLLM's module `vllm.entrypoints.openai.api_server` always starts one. Its command `vllm serve`
decides how many there are, none on a headless node, but asks for the version of a package named
`vllm`, which the CPU build is not. So the command is called here. `vtoken serve` checks its own
flags and passes vLLM's on; what depends on those is done here, where vLLM's parser has read them.
"""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence

from vtoken.vllm.startup import startup_error
from vtoken.vllm.startup.settings import KEY
from vtoken.vllm.touchpoints import register

FOLDER = "VTOKEN_API_FOLDER"  # shared by the API processes of one server, see vtoken_api.forwarding
NO_SERVER = "there would be no API server"


def server_arguments(words: Sequence[str] | None = None) -> Namespace:
    """vLLM's arguments from the command line's `words`, with vToken's defaults.

    Ends with 2 and a message on arguments that vToken does not serve. Imports vLLM.
    """
    from vtoken.vllm.startup import vllm_cli

    parser = vllm_cli.make_arg_parser(vllm_cli.FlexibleArgumentParser(prog="vtoken serve"))
    parser.set_defaults(model=None)  # vLLM's default is a model of its own
    args: Namespace = parser.parse_args(words)
    for reason in refusals(args):
        parser.exit(2, f"vtoken serve: error: {reason}\n")
    if args.host is None:
        args.host = "127.0.0.1"  # vLLM's own default is every interface
    if args.chat_template is not None:  # vLLM does not pass it to the engine
        args.additional_config[KEY]["chat_template"] = args.chat_template
    if args.data_parallel_size > 1:  # each of its engines is told that it is the only one
        local = args.data_parallel_size_local or args.data_parallel_size
        args.additional_config[KEY]["local_engines"] = local
    return args


def refusals(args: Namespace) -> Iterator[str]:
    """Why vToken does not start a server with vLLM's `args`."""
    if args.model is None and args.model_tag is None:
        yield "MODEL is missing"
    if args.grpc:
        yield "--grpc is not supported: /vtoken/v1 is served over HTTP only"
    if args.data_parallel_multi_port_external_lb:
        yield (
            "--data-parallel-multi-port-external-lb is not supported: start every replica with a "
            "command of its own"
        )
    if args.api_server_count == 0:
        yield f"--api-server-count 0 is not supported: {NO_SERVER}"
    if args.headless and args.data_parallel_size > 1:
        yield (
            "--headless is not supported: with data parallelism the node would hold an engine, "
            "which publishes to an API server on its own machine only; start a server on every node"
        )
    elif args.headless and (args.nnodes < 2 or args.node_rank < 1):
        yield (
            f"--headless is not supported: {NO_SERVER}; it is for the workers of another node's "
            "engine, with --nnodes and a --node-rank above 0"
        )


def main() -> None:
    """Serve until the server ends; its API processes find a private folder that they share."""
    startup_error.print_at_exit()
    register.check("server")
    from vllm.entrypoints.cli.serve import ServeSubcommand

    from vtoken.vllm.startup import vllm_cli

    vllm_cli.cli_env_setup()
    args = server_arguments()
    vllm_cli.configure_logging_from_args(args)
    vllm_cli.validate_parsed_serve_args(args)
    with tempfile.TemporaryDirectory(prefix="vtoken-api-") as folder:  # mode 0700
        os.environ[FOLDER] = folder
        try:
            ServeSubcommand.cmd(args)
        except Exception as error:
            startup_error.keep(startup_error.words_of_server(error, args))
            raise


if __name__ == "__main__":
    main()
