"""The typed frame of a config; the families (model, data, optimizer, strategy) stay open.

A family's schema is its constructor: its YAML lists every key, and Hydra's struct mode refuses any other. What no type
can say (a learning rate is positive) is checked here, before anything is submitted and without importing torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

CONF = next(
    folder for folder in (Path(__file__).parent / "conf", Path(__file__).parent.parent / "conf") if folder.is_dir()
)
"""The YAML files: inside the package where a wheel was installed, beside it in a checkout."""

SCIENCE = ("model", "size", "data", "optimizer", "strategy", "precision", "train", "seed")
"""What a cell is; everything else is how and where it runs."""

PRECISIONS = ("fp32", "bf16")
SIZES = ("tiny", "paper")
ON_FAILURE = ("hold", "continue")
MOST_HZ = 100
LEAST = {
    "train.updates": 1,
    "train.batch_size": 1,
    "train.eval_every": 1,
    "train.warmup": 0,
    "launch.workers": 1,
    "launch.threads": 1,
    "launch.cells_per_job": 1,
    "launch.throttle": 1,
    "gate.samples": 1,
}
"""The smallest values of keys that count something."""


class UserError(Exception):
    """A mistake in a command or config: one line that names the key, the value, and what is allowed."""


@dataclass
class Train:
    """The training budget of the baseline; a strategy's arm may derive another from it."""

    updates: int = MISSING
    batch_size: int = MISSING  # effective: samples per update
    eval_every: int = MISSING  # updates between two evaluations; there is one before the first and after the last
    warmup: int = 3  # updates at the start that no time statistic counts


@dataclass
class Gate:
    """The validity gate: one untimed update beside plain backprop."""

    enabled: bool = True
    samples: int | None = None  # compare on at most so many; null: the whole effective batch


@dataclass
class Probe:
    """What is measured beside the training."""

    audit: bool = True  # exact bytes of one un-timed update, by category
    hz: float = 10.0  # samples of the machine a second, up to 100; 0: none. Of spikes of 60 ms, 10 misses a third


@dataclass
class Plan:
    """What is predicted before anything runs, without a GPU."""

    predict: bool = True  # by `gradbench plan`: peak memory and operations of every cell
    gpu: str | None = None  # what cells must fit: a GPU's name, or its bytes


@dataclass
class Tracking:
    """Where MLflow's copy goes; `uri: null` is the store inside the runs folder."""

    uri: str | None = None
    experiment: str = "gradbench"


@dataclass
class Launch:
    """How many at once, and what to do when things go wrong; most is for SLURM."""

    workers: int | None = None  # local, at a time; null: one per GPU, else as many as the cores carry
    threads: int | None = None  # CPU threads of a cell; null: cores divided by workers
    wait: bool = True  # false: submit and return
    cells_per_job: int = 1  # cells that one job runs, one after the other: it imports torch once
    throttle: int | None = None  # jobs at a time, over all arrays; null: hydra.launcher.array_parallelism
    resume_on_timeout: bool = False  # requeue what the time limit stops, as after a preemption
    on_failure: str = "hold"  # hold the rest when the first cells all die of one error | continue
    skip_oom: bool = False  # skip the cells that can't fit plan.gpu, which else refuse the sweep


@dataclass
class Resources:
    """What one cell asks for; null means no limit on a local worker."""

    gpus: int = 1  # at most so many; a machine without a GPU runs on its CPU
    cpus: int | None = None  # of all its processes together
    mem_gb: float | None = None  # of all its processes together
    time_min: float | None = None
    processes: int | None = None  # that train it together, data-parallel; null: one per GPU, else one
    nodes: int = 1  # on SLURM; each has GPUs, cores, memory and processes as above


@dataclass
class Frame:
    """The whole config."""

    seed: int = MISSING
    size: str = MISSING
    precision: str = MISSING
    train: Train = field(default_factory=Train)
    model: Any = MISSING
    data: Any = MISSING
    optimizer: Any = MISSING
    strategy: Any = MISSING
    gate: Gate = field(default_factory=Gate)
    probe: Probe = field(default_factory=Probe)
    plan: Plan = field(default_factory=Plan)
    tracking: Tracking = field(default_factory=Tracking)
    launch: Launch = field(default_factory=Launch)
    resources: Resources = field(default_factory=Resources)
    runs: str = MISSING
    rerun: str = "missing"  # missing | all


def register() -> None:
    """Make the frame known to Hydra as the config named `frame`."""
    ConfigStore.instance().store("frame", Frame)


def check(config: Mapping[str, Any]) -> None:
    """Raise `UserError` for a resolved config whose values make no sense in themselves."""
    for key in config:
        if key not in Frame.__dataclass_fields__:
            raise UserError(f"{key}: no such key; allowed: {', '.join(sorted(Frame.__dataclass_fields__))}")
    for key in Frame.__dataclass_fields__:
        if key not in config:
            raise UserError(f"{key} is missing: every cell needs it")
    _choice("size", config["size"], SIZES)
    _choice("precision", config["precision"], PRECISIONS)
    _choice("rerun", config["rerun"], ("missing", "all"))
    for key, least in LEAST.items():
        room, _, name = key.partition(".")
        if config[room][name] is not None:
            _at_least(key, config[room][name], least)
    if not 0 <= config["seed"] < 2**32:
        raise UserError(f"seed={config['seed']}: must be between 0 and 2**32 - 1")
    _choice("launch.on_failure", config["launch"]["on_failure"], ON_FAILURE)
    for key, value in config["resources"].items():
        if value is not None and not (0 < value < float("inf") or value == 0 == (key != "gpus")):  # nan is neither
            bound = "0 or more" if key == "gpus" else "more than 0"
            raise UserError(f"resources.{key}={value:g}: must be {bound}")
    if not 0 <= config["probe"]["hz"] <= MOST_HZ:
        raise UserError(f"probe.hz={config['probe']['hz']:g}: must be between 0 (no samples) and {MOST_HZ}")
    if not config["runs"]:
        raise UserError("runs= is empty: it names the folder of the results")
    check_processes(config)
    _learning_rate(config["optimizer"])


def processes_of(resources: Mapping[str, Any]) -> int:
    """Return how many processes train a cell together, where there are as many GPUs as it asks for."""
    asked = {**vars(Resources()), **resources}
    return int(asked["nodes"] * (asked["processes"] or max(1, asked["gpus"])))


def check_processes(config: Mapping[str, Any]) -> None:
    """Raise `UserError` where the processes that train a cell can't share its batches out evenly."""
    asked, batch_size = {**vars(Resources()), **config["resources"]}, config["train"]["batch_size"]
    key = "gpus" if asked["processes"] is None else "processes"
    words = [f"resources.{name}={asked[name]}" for name in ("nodes", key) if asked[name] != 1]
    if key == "processes":
        _at_least("resources.processes", asked["processes"], 1)
    _at_least("resources.nodes", asked["nodes"], 1)
    if batch_size % processes_of(asked):
        raise UserError(f"train.batch_size={batch_size}: not divisible by {' x '.join(words)}")


def _learning_rate(optimizer: Mapping[str, Any]) -> None:
    if "lr" not in optimizer:
        raise UserError("optimizer.lr is missing: every optimizer's YAML has it, so that sweeps can name it")
    value = optimizer["lr"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"optimizer.lr={'null' if value is None else value}: must be a number")
    if not 0 < value < float("inf"):
        raise UserError(f"optimizer.lr={value}: must be positive and finite")


def _choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{key}={value}: must be one of {', '.join(allowed)}")


def _at_least(key: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{key}={value}: must be {least} or more")


def science(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a resolved config that makes the cell what it is."""
    return {key: config[key] for key in SCIENCE}


def cell_id(scientific: Mapping[str, Any]) -> str:
    """Return the first 12 hex digits of the SHA-256 of the canonical JSON of `scientific`."""
    text = json.dumps(_canonical(scientific), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _canonical(value: Any) -> Any:
    """Give two spellings of one value (1 and 1.0, 1e-1 and 0.1) one form."""
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
