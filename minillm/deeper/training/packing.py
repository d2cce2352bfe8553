"""Documents of many lengths put together with little padding (deeper/07_data_sources)."""

# Built from notebooks/deeper/07_data_sources.ipynb: edit there, then make build.

from collections.abc import Sequence

__all__ = ["batches_of_like_length", "pack", "share_rows"]


def batches_of_like_length(rows: list[list[int]], budget: int) -> list[list[list[int]]]:
    """Cut rows, sorted by length, into batches whose padded size stays within `budget` tokens."""
    batches: list[list[list[int]]] = [[]]
    for row in rows:
        longest = max(len(r) for r in [*batches[-1][:1], row])  # sorted upwards or downwards
        if batches[-1] and (len(batches[-1]) + 1) * (longest - 1) > budget:
            batches.append([])
        batches[-1].append(row)
    return batches


def share_rows(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Which pieces share a row of `width`: the longest first, each in the first row with room."""
    packed: list[list[int]] = []
    room: list[int] = []
    open_rows: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        row = next((r for r in open_rows if lengths[i] <= room[r]), None)
        if row is None:
            row = len(packed)
            packed.append([])
            room.append(width)
            open_rows.append(row)
        packed[row].append(i)
        room[row] -= lengths[i]
        if len(packed[row]) > 1 and room[row] < 8:
            open_rows.remove(row)
    return packed


def pack(rows: list[list[int]], width: int) -> list[list[int]]:
    """Whole documents share a row of at most `width` ids; one's end token begins the next.

    Where documents begin with another token than they end with, each keeps its own.
    """
    shared = int(bool(rows) and rows[0][0] == rows[0][-1])  # tokens that two neighbours share
    packed = share_rows([len(row) - shared for row in rows], width - shared)
    return [
        [*rows[row[0]][:shared], *(id for i in row for id in rows[i][shared:])] for row in packed
    ]
