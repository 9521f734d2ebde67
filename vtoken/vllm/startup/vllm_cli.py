"""What vLLM's command does with the arguments of a server, from where the installed version has it.

Importing this module imports vLLM.
"""

from __future__ import annotations

from vllm.logger import configure_logging_from_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.common.startup import cli_env_setup
except ImportError:  # vLLM 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

__all__ = [
    "FlexibleArgumentParser",
    "cli_env_setup",
    "configure_logging_from_args",
    "make_arg_parser",
    "validate_parsed_serve_args",
]
