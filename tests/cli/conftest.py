"""Fixtures of the CLI tests."""

from served_core import core, served, stepping  # noqa: F401
