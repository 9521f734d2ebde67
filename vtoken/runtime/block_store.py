"""The owner of the physical blocks, as the runtime sees it: the engine, or a stand-in for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from vtoken.tables.token_table import TokenTable


class BlockStore(Protocol):
    """Who owns the physical blocks."""

    def num_free_blocks(self) -> int:
        """Blocks that could be allocated now."""

    def is_writable(self, block: int) -> bool:
        """Whether the sole holder may write it: not shared, no prefix hash."""

    def first_not_writable(self, blocks: Sequence[int]) -> int | None:
        """The first of `blocks` that may not be written; None: all may."""

    def is_shared(self, block: int) -> bool:
        """Whether two requests or more hold it."""

    def take(self, num_blocks: int) -> list[int]:
        """Allocate fresh private blocks; the caller asked `num_free_blocks` first."""

    def rebind(self, request_id: str, blocks: Sequence[int]) -> None:
        """`blocks` is the request's block table from now on; blocks that left are not freed yet."""

    def lend(self, num_blocks: int) -> list[int]:
        """Up to `num_blocks` free blocks that cache nothing. They stay free: their contents may be
        overwritten during the step being planned, and mean nothing after it."""

    def give_back(self, blocks: Sequence[int]) -> None:
        """One reference fewer for each of `blocks`; unreferenced ones become free."""

    def blocks_from(self, request_id: str, first: int) -> Sequence[int]:
        """The request's blocks from the `first`-th of its block table on."""

    def differences(self, tables: Iterable[TokenTable]) -> list[str]:
        """Where the owner's books differ from `tables`, in words: block tables, reference counts,
        free blocks. For checking; costs as much as the blocks held."""
