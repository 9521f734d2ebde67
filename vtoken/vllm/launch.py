"""`python -m vtoken.vllm.launch`: vLLM's own server, in as many API processes as it is told to.

vLLM's module `vllm.entrypoints.openai.api_server` always starts one. Its command `vllm serve`
decides how many there are, none on a headless node, but asks for the version of a package named
`vllm`, which the CPU build is not. So the command is called here. `vtoken serve` checks and
completes the arguments.
"""

from __future__ import annotations

import os
import tempfile

from vtoken.vllm.startup import startup_error
from vtoken.vllm.touchpoints import register

FOLDER = "VTOKEN_API_FOLDER"  # shared by the API processes of one server, see vtoken_api.forwarding


def main() -> None:
    """Serve until the server ends; its API processes find a private folder that they share."""
    startup_error.print_at_exit()
    register.check("server")
    from vllm.entrypoints.cli.serve import ServeSubcommand

    from vtoken.vllm.startup import vllm_cli

    vllm_cli.cli_env_setup()
    parser = vllm_cli.FlexibleArgumentParser(prog="vtoken serve")
    args = vllm_cli.make_arg_parser(parser).parse_args()
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
