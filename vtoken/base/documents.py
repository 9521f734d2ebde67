"""Decoding of bytes from outside this process: files, clients, servers.

Every failure is a MalformedError, whatever the bytes are: not JSON, not UTF-8, of another shape, or
nested so deep that a decoder gives up.

msgspec describes a type at its first use, and a second thread that uses the type in the meantime
crashes the process. So decoders are made one at a time, and those that a thread shares types with
when their module is imported.
"""

from __future__ import annotations

import threading
from typing import Any, Generic, Literal, TypeVar

import msgspec

from vtoken.base.errors import VTokenError

T = TypeVar("T")

TOO_DEEP = "it nests too deep"

_describing = threading.Lock()


class MalformedError(VTokenError, ValueError):
    """Bytes that are not the expected document; the message has the reason in one line."""


class Decoder(Generic[T]):
    """Decodes documents of type `kind`: JSON text, or msgpack."""

    def __init__(self, kind: type[T] | Any, format: Literal["json", "msgpack"] = "json") -> None:  # noqa: A002
        codec = msgspec.json if format == "json" else msgspec.msgpack
        with _describing:
            self._decoder = codec.Decoder(kind)

    def decode(self, data: bytes | str) -> T:
        """The document in `data`; raises MalformedError."""
        try:
            document: T = self._decoder.decode(data)
        except RecursionError:
            raise MalformedError(TOO_DEEP) from None
        except ValueError as error:  # msgspec's errors, and UnicodeDecodeError
            raise MalformedError(str(error)) from error
        return document
