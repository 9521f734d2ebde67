"""The interface to the owner of the physical blocks: the engine, or a substitute in tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from vtoken.core.tables.token_table import TokenTable


class BlockStore(Protocol):
    """The owner of the physical blocks."""

    def num_free_blocks(self) -> int:
        """Blocks that could be allocated now."""

    def is_writable(self, block: int) -> bool:
        """Whether its only holder may write it: not shared, no prefix hash."""

    def first_not_writable(self, blocks: Sequence[int]) -> int | None:
        """The first of `blocks` that may not be written, or None."""

    def is_shared(self, block: int) -> bool:
        """Whether two requests or more hold it."""

    def take(self, num_blocks: int) -> list[int]:
        """Allocate fresh private blocks; the caller checks `num_free_blocks` first."""

    def rebind(self, request_id: str, blocks: Sequence[int]) -> None:
        """Set the request's block table to `blocks`; removed blocks are not freed yet."""

    def remove(self, request_id: str, runs: Sequence[tuple[int, int]]) -> None:
        """Remove the entries [start, end) of each of `runs`, ascending, from the request's block
        table; their blocks are not freed yet."""

    def borrow(self, num_blocks: int) -> list[int]:
        """Up to `num_blocks` free blocks without a prefix hash, as scratch space for the step being
        planned. They stay free, and their contents are undefined afterwards."""

    def give_back(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of `blocks`; unreferenced ones become free."""

    def blocks_from(self, request_id: str, first: int) -> Sequence[int]:
        """The request's block table from index `first` on."""

    def differences(self, tables: Iterable[TokenTable]) -> list[str]:
        """Describe where the owner's records differ from `tables`: block tables, reference counts,
        free blocks. For checks; takes time proportional to the blocks held."""
