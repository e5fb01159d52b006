"""The hash model's KV cache: each cell holds a token and the digest of all tokens up to it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plugins.hash.digest import DIGEST_BYTES
from plugins.sdk.runner import IntArray

TOKEN_BYTES = 4
CELL_BYTES = TOKEN_BYTES + DIGEST_BYTES


class CellPages:
    """Pages of cells, addressed by (page table, position)."""

    def __init__(self, *, page_count: int, page_size: int) -> None:
        self._page_size = page_size
        self._tokens = np.zeros((page_count, page_size), dtype=">u4")
        self._digests = np.zeros((page_count * page_size, DIGEST_BYTES), dtype=np.uint8)
        self._flat_tokens = self._tokens.reshape(-1)
        # One buffer protocol object for both: a slice of it costs a tenth of indexing the array.
        self._digest_view = self._digests.reshape(-1).data
        self._token_view = self._flat_tokens.view(np.uint8).data

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._page_size

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return int(self._tokens.nbytes + self._digests.nbytes)

    def cells(self, page_table: IntArray, positions: IntArray) -> IntArray:
        """Cell numbers, shape [n], of one position in each of n page tables [n, pages]."""
        pages = page_table[np.arange(len(positions)), positions // self._page_size]
        cells: IntArray = pages * np.int32(self._page_size) + positions % self._page_size
        return cells

    def cells_of_run(self, page_ids: IntArray, start: int, end: int) -> npt.NDArray[np.int64]:
        """Cell numbers of the positions [start, end) of one page table."""
        positions = np.arange(start, end)
        return page_ids[positions // self._page_size].astype(np.int64) * self._page_size + (
            positions % self._page_size
        )

    def read_digest(self, cell: int) -> bytes:
        """The digest of a cell."""
        return self._digest_view[cell * DIGEST_BYTES : (cell + 1) * DIGEST_BYTES].tobytes()

    def write(self, cell: int, token_bytes: bytes, digest: bytes) -> None:
        """Write one cell; `token_bytes`: 4 bytes, big-endian."""
        self._token_view[cell * TOKEN_BYTES : (cell + 1) * TOKEN_BYTES] = token_bytes
        self._digest_view[cell * DIGEST_BYTES : (cell + 1) * DIGEST_BYTES] = digest

    def write_tokens(self, page_ids: IntArray, start: int, token_ids: IntArray) -> None:
        """Write the tokens of a run of positions; their digests follow by `write_digests`."""
        self._flat_tokens[self.cells_of_run(page_ids, start, start + len(token_ids))] = token_ids

    def write_digests(self, page_ids: IntArray, start: int, digests: list[bytes]) -> None:
        """Write the digests of a run of positions."""
        values = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        self._digests[self.cells_of_run(page_ids, start, start + len(digests))] = values

    def read_tokens(self, page_ids: IntArray, count: int) -> bytes:
        """The first `count` tokens of a page table as they lie in the pages: 4 big-endian bytes each."""
        pages = -(-count // self._page_size)
        return self._tokens[page_ids[:pages]].tobytes()[: count * TOKEN_BYTES]
