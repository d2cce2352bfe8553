"""A name is a folder, or a repository on the hub of which the needed files are fetched.

Used by `minillm.pretrained`; written by hand, not built.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["FILES", "local_folder"]

# What we read, and nothing else: many repositories hold the same weights in three more formats.
FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+|[\w-][\w.-]*")


def local_folder(name: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of that name, or else where the hub's files of that name lie.

    Raises: FileNotFoundError if there is neither, or if the hub cannot be asked.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if not isinstance(name, str) or not _REPOSITORY.fullmatch(name) or name.startswith("."):
        raise FileNotFoundError(f"no folder {str(name)!r} (and no name 'owner/model' of the hub)")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        message = f"no folder {name!r}; to ask the hub for it, pip install huggingface_hub"
        raise FileNotFoundError(message) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES))
    except (OSError, ValueError) as error:  # the hub's errors are of these two kinds
        what = name if revision is None else f"{name} at revision {revision}"
        reason = f"{type(error).__name__}: {error}".strip()
        raise FileNotFoundError(
            f"no folder {name!r}, and not from the hub: {what}: {reason}"
        ) from error
