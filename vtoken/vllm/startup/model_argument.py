"""Finds MODEL on a command line of vLLM flags, with and without values.

Before all flags, or after `--flag=value`, a word is certainly MODEL. Elsewhere, vLLM's own parser
tells which flags take values. Importing vLLM takes ten seconds or more of one core, and the server
imports it again, so it is imported only then.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping

Values = int | str | None  # argparse's nargs; 0: none, None: one
NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")


def take_model(
    words: list[str], flag_values: Callable[[], Mapping[str, Values]]
) -> tuple[str | None, list[str]]:
    """MODEL and the remaining words; MODEL is None if it is missing or `--model` is given.

    `flag_values`: flag -> number of values. Raises ValueError when two words could be MODEL.
    """
    if any(word.partition("=")[0] == "--model" for word in words):
        return None, words
    bare = [place for place, word in enumerate(words) if not is_flag(word)]
    if not bare:
        return None, words
    if bare[0] != 0 and not _has_value(words[bare[0] - 1]):
        bare = positionals(words, flag_values())
        if not bare:
            return None, words
        if len(bare) > 1:
            raise ValueError(f"more than one MODEL: {' '.join(words[place] for place in bare)}")
    place = bare[0]
    return words[place], words[:place] + words[place + 1 :]


def positionals(words: list[str], values: Mapping[str, Values]) -> list[int]:
    """Places of the words that are neither a flag nor a value of one."""
    found, left = [], 0.0  # `left`: number of words that may still be values of the last flag
    for place, word in enumerate(words):
        if is_flag(word):
            left = 0 if _has_value(word) else _num_values(word, values)
        elif left > 0:
            left -= 1
        else:
            found.append(place)
    return found


def is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not NUMBER.match(word)


def _has_value(word: str) -> bool:
    """Whether `word` is `--flag=value`, which takes no further value."""
    return is_flag(word) and "=" in word


def _num_values(flag: str, values: Mapping[str, Values]) -> float:
    """The largest number of values of `flag`. vLLM's parser accepts `_` for `-`, `--json-arg.key
    VALUE`, and short flags with the value attached.
    """
    name = flag.replace("_", "-").partition(".")[0]
    if name not in values:
        longer = [flag for flag in values if flag.startswith(name)]
        attached = not name.startswith("--") and name[:2] in values
        if attached:
            return 0
        if len(longer) != 1:
            return 1
        name = longer[0]
    count = values[name]
    if isinstance(count, int):
        return count
    return float("inf") if count in ("+", "*") else 1


def flag_values() -> dict[str, Values]:
    """Every flag of vLLM's server; imports vLLM. Raises ValueError if vLLM's parser is missing."""
    try:
        from vtoken.vllm.startup import vllm_cli
    except ImportError as error:
        raise ValueError(f"put MODEL before the flags: {error}") from None
    parser: argparse.ArgumentParser = vllm_cli.make_arg_parser(vllm_cli.FlexibleArgumentParser())
    return {flag: action.nargs for action in parser._actions for flag in action.option_strings}
