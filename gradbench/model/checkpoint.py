"""Where weights come from, and what can be told of it without opening a file or importing a library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Source:
    """Where the weights come from: the current random state, or a checkpoint (hub id or local folder)."""

    pretrained: bool = False
    checkpoint: str | None = None
    key: str = "model.checkpoint"  # what the user calls it


def readable(source: Source) -> str:
    """Return the checkpoint of a pretrained model as `from_pretrained` wants it.

    Raises:
        ValueError: In one line, when there is none, or a folder without weights that can be read.
    """
    if not source.checkpoint:
        raise ValueError(f"{source.key}=null: pretrained=true needs a hub id or a local folder")
    folder = Path(source.checkpoint).expanduser()
    if not folder.is_dir():
        if source.checkpoint.startswith(("/", ".", "~")):
            raise ValueError(f"{source.key}={source.checkpoint}: there is no such folder")
        return source.checkpoint
    if not (folder / "config.json").is_file():  # the library would go on with its default sizes
        raise ValueError(f"{source.key}={source.checkpoint}: the folder holds no config.json")
    if any(folder.glob("*.safetensors")):
        return str(folder)
    if any(folder.glob("*.bin")):
        raise ValueError(f"{source.key}={source.checkpoint}: holds pickled weights only; *.safetensors are required")
    raise ValueError(f"{source.key}={source.checkpoint}: the folder holds no weights (*.safetensors)")
