"""What all whole models have: a count of their numbers, and a way into files and back.

Written by hand.
"""

import os
from importlib import import_module
from typing import Any, ClassVar, Self

import torch
from torch import nn

from minillm.support.door import Door


class SavedModel(nn.Module):
    """A model that lies in files: `files` names its module and `Layout` in `deeper.pretrained`."""

    files: ClassVar[str]

    num_parameters = Door("minillm.support.counting:count_parameters")

    @classmethod
    def layout(cls) -> Any:
        """How such a model lies in files."""
        module, _, name = cls.files.partition(".")
        return getattr(import_module(f"minillm.deeper.pretrained.{module}"), name)

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        revision: str | None = None,
    ) -> Self:
        """The model of a folder or of a repository; see `deeper.pretrained.folder.read_folder`."""
        from minillm.deeper.pretrained.folder import local_place, read_dtype, read_folder

        wanted = read_dtype(dtype)
        return read_folder(cls.layout(), local_place(name, revision), dtype=wanted, device=device)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write files that transformers reads; see `deeper.pretrained.folder.write_folder`."""
        from minillm.deeper.pretrained.folder import write_folder

        write_folder(self.layout(), self, folder)
