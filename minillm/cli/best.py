"""The weights that did best on the held-out part of a file. Written by hand."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any


class Best:
    """Keeps the weights with the lowest held-out bits in `best-STEP.safetensors` of the run.

    A text that is small is read again and again, and what is held out gets worse long before the
    training ends. A run that is resumed finds what it kept, as far as it has come.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.step, self.held_out = folder, 0, math.inf

    def path(self, step: int) -> Path:
        """Where the weights of a step lie."""
        return self.folder / f"best-{step}.safetensors"

    def resume(self, step: int) -> None:
        """Go on with the best look up to `step`; what a killed run kept beyond it is dropped."""
        with suppress(FileNotFoundError):
            lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            for record in map(json.loads, lines):
                if record["step"] <= step and record.get("held_out", math.inf) < self.held_out:
                    self.step, self.held_out = record["step"], record["held_out"]
        self._drop_others()

    def look(self, record: dict[str, Any], model: Any) -> None:
        """Keep the weights of `model` if the record has fewer held-out bits than all before."""
        from minillm.deeper.training.distributed import is_sharded, whole_tensors
        from minillm.support.files import replacing, write_tensors

        if record.get("held_out", math.inf) < self.held_out:
            self.step, self.held_out = record["step"], record["held_out"]
            if not is_sharded(model):  # to gather them, all processes would have to call this
                with replacing(self.path(self.step)) as temporary:
                    write_tensors(temporary, whole_tensors(model))
            self._drop_others()

    def tensors(self, last_step: int) -> dict[str, Any] | None:
        """The weights that are better than those of the last step; None if there are none."""
        from safetensors.torch import load_file

        path = self.path(self.step)
        return load_file(path) if self.step < last_step and path.exists() else None

    def said(self, last_step: int, last: float | None) -> str:
        """The sentence about it for the end of a run."""
        if self.step == last_step:
            return f"held out: best at step {last_step}, the last"
        ended = "" if last is None else f", {last:.4f} at the end"
        kept = self.step if self.path(self.step).exists() else last_step
        model = f"model.safetensors is of step {kept}, the newest checkpoint of step {last_step}"
        return f"held out: best at step {self.step}, {self.held_out:.4f}{ended}; {model}"

    def _drop_others(self) -> None:
        for path in self.folder.glob("best-*.safetensors"):
            if path != self.path(self.step):
                path.unlink()
