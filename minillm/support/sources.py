"""What batches come from: any iterable, or a source that knows where it stands. By hand.

Explained in deeper/07_data_sources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from minillm.support.checks.kinds import index_in

if TYPE_CHECKING:
    from torch import Tensor


class IndexedSource:
    """What gives items without end, item i depending on `settings` and on i alone.

    So a number, `index`, says where it stands. One of your own sets `settings` (plain JSON) and
    says what `item(index)` is.
    """

    settings: dict[str, Any]  # what must not change
    index = 0  # of the next item
    shown = ""  # the settings as `repr` has them

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown.format(**self.settings)})"

    def item(self, index: int) -> Any:
        """Item number `index`."""
        raise NotImplementedError

    def __iter__(self) -> IndexedSource:
        return self

    def __next__(self) -> Any:
        item = self.item(self.index)
        self.index += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands, with the settings that must not change."""
        return {**self.settings, "index": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where `state` says. Raises: ValueError if its settings are others than ours."""
        self.index = index_in(state, self.state_dict())


class BatchSource(Protocol):
    """What a training draws from: batches without end, and a state (plain JSON) to go back to."""

    def __next__(self) -> tuple[Tensor, Tensor]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def batch_source(batches: Any) -> BatchSource:
    """`batches` itself if it has a state; any other iterable of (inputs, targets) is given one.

    Raises: ValueError for what is no batches, such as texts.
    """
    if all(hasattr(batches, name) for name in ("__next__", "state_dict", "load_state_dict")):
        return batches
    from minillm.deeper.training.plain_batches import PlainBatches

    return PlainBatches(batches)
