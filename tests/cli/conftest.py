"""Fixtures of the CLI tests."""

from tests.support.served_core import core, served, stepping  # noqa: F401
