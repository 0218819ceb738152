"""What cells want from the Hugging Face hub, fetched once, before jobs start that make no network call.

It goes to the hub's cache (HF_HOME), which the jobs share. What is there already is taken as it is, without asking
whether the hub has a newer one: so a rerun has what its sweep had.
"""

from __future__ import annotations

import json
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars

from gradbench.config import UserError
from gradbench.data import source

ANSWERS_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Wanted(ABC):
    """Something that a cell will read from the cache."""

    key: str  # what the user calls it
    name: str  # hub id

    kind: ClassVar[str] = "model"  # of repository
    needs: ClassVar[str]  # what has to be in it

    def __str__(self) -> str:
        """Return it as the user may write it."""
        return f"{self.key}={self.name}"

    @abstractmethod
    def is_cached(self) -> bool:
        """Tell whether all of it is there."""

    @abstractmethod
    def fetch(self) -> None:
        """Bring it there."""

    @property
    @abstractmethod
    def elsewhere(self) -> str:
        """The command that copies it to a folder, and the key that takes the folder."""


class Weights(Wanted):
    """The weights and the settings of a model, nothing pickled among them."""

    needs = "config.json and model.safetensors"

    def is_cached(self) -> bool:
        """Tell whether the settings and every shard of the weights are there."""
        index = _cached(self.name, "model.safetensors.index.json")
        shards = json.loads(index.read_text())["weight_map"].values() if index else ["model.safetensors"]
        return all(_cached(self.name, file) for file in {"config.json", *shards})

    def fetch(self) -> None:
        """Download them, with every other JSON file of the model."""
        huggingface_hub.snapshot_download(self.name, allow_patterns=["*.safetensors", "*.json"])

    @property
    def elsewhere(self) -> str:
        """As for all."""
        files = "--include '*.safetensors' --include '*.json'"
        return f"hf download {self.name} {files} --local-dir FOLDER, then {self.key}=FOLDER"


class TokenizerFile(Wanted):
    """The tokenizer of a model."""

    needs = "tokenizer.json"

    def is_cached(self) -> bool:
        """Tell whether the one file is there."""
        return _cached(self.name, self.needs) is not None

    def fetch(self) -> None:
        """Download that file."""
        huggingface_hub.snapshot_download(self.name, allow_patterns=[self.needs])

    @property
    def elsewhere(self) -> str:
        """As for all."""
        return f"hf download {self.name} {self.needs} --local-dir FOLDER, then {self.key}=FOLDER"


@dataclass(frozen=True, slots=True)
class DataSet(Wanted):
    """All splits of a data set."""

    subset: str | None

    kind = "dataset"
    needs = "data that `datasets` reads, and data.subset=... where it has several"

    def is_cached(self) -> bool:
        """Tell whether `datasets` can read it without a network."""
        return source.is_cached(source.Source(self.name, self.subset))

    def fetch(self) -> None:
        """Download it, and convert it as `datasets` does."""
        source.load(source.Source(self.name, self.subset))

    @property
    def elsewhere(self) -> str:
        """As for all."""
        words = ", ".join(repr(word) for word in (self.name, self.subset) if word is not None)
        code = f"import datasets; datasets.load_dataset({words}).save_to_disk('FOLDER')"
        return f'python -c "{code}", then data.folder=FOLDER'


def wanted(config: Mapping[str, Any]) -> Iterator[Wanted]:
    """Yield what a cell of this config wants from the hub. Only what is of gradbench's own rooms is known."""
    model, data = config["model"], config["data"]
    if str(model.get("_target_")).startswith("gradbench.model.") and model.get("pretrained") is True:
        for key in (key for key in model if key.endswith("checkpoint")):
            if not Path(model[key]).expanduser().is_dir():
                yield Weights(f"model.{key}", model[key])
    if str(data.get("_target_")).startswith("gradbench.data.hub."):
        if "tokenizer" in data and not Path(data["tokenizer"]).exists():
            yield TokenizerFile("data.tokenizer", data["tokenizer"])
        if data["folder"] is None:
            yield DataSet("data.name", data["name"], data["subset"])


def missing(configs: Iterable[Mapping[str, Any]]) -> list[Wanted]:
    """Return what cells of these configs want and the cache lacks, each thing once.

    Raises:
        UserError: a data set is wanted, and `datasets` is not installed.
    """
    things = dict.fromkeys(each for config in configs for each in wanted(config))
    try:
        return [each for each in things if not each.is_cached()]
    except source.NotInstalled as error:
        raise UserError(str(error)) from error


def fetch(things: Iterable[Wanted], say: Callable[[str], object]) -> None:
    """Bring things into the cache, and say so of each, for it may take long.

    Raises:
        UserError: one of them can't be had; the line says how else.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # errors are raised as well
    for each in things:
        if each.is_cached():  # it came with one before it
            continue
        say(f"fetching {each} from the hub to {constants.HF_HOME}")
        try:
            _ask(each)
            each.fetch()
        except Exception as error:  # of any type: the hub's, the network's, the disk's
            raise UserError(f"{each}: {_why(error, each)}; elsewhere: {each.elsewhere}") from error
        if not each.is_cached():
            raise UserError(f"{each}: the hub has none of it that can be read; needed: {each.needs}")


def _cached(name: str, file: str) -> Path | None:
    try:
        path = huggingface_hub.try_to_load_from_cache(name, file)
    except HFValidationError:  # no name of the hub: to fetch it says so
        return None
    return Path(path) if isinstance(path, str) else None


def _ask(thing: Wanted) -> None:
    """Ask whether there is such a thing and this user may have it: a download would try for long before it says no."""
    api = huggingface_hub.HfApi()
    api.repo_info(thing.name, repo_type=thing.kind, timeout=ANSWERS_WITHIN_S)
    api.auth_check(thing.name, repo_type=thing.kind)


def _why(error: Exception, thing: Wanted) -> str:
    """Return in words why a thing can't be had, and what would help."""
    where = "/".join(filter(None, (constants.ENDPOINT, "datasets" if thing.kind == "dataset" else "", thing.name)))
    if isinstance(error, GatedRepoError):
        return f"is gated; accept its licence at {where}, and set HF_TOKEN to a token of yours (or: hf auth login)"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no {where}, or it is private and needs HF_TOKEN"
    if constants.HF_HUB_OFFLINE:
        return "not in the cache, and HF_HUB_OFFLINE is set"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{constants.ENDPOINT} did not send it ({first})"
