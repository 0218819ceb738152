"""The one caller of submitit: an array becomes an sbatch script of a single python command, and its tasks pickles."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
import unicodedata
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf

from gradbench.config import CONF
from gradbench.record import CellSpec
from gradbench.sweep.slurm import arrays, node
from gradbench.sweep.slurm.arrays import Array
from gradbench.sweep.slurm.plan import time_limit_min, warning_s

_BASE = {field.name for field in fields(BaseQueueConf)}
_NOT_SBATCH = {"_target_", "submitit_folder", "max_num_timeout", "kind"}
_NAME_CHARS = 200
_TOO_MANY = ("MaxSubmitJob", "GrpSubmitJob", "MaxJobCount", "Slurm temporarily unable to accept job")


class Refused(Exception):
    """`sbatch` did not take an array; the message is its last sentence."""

    @property
    def for_now(self) -> bool:
        """Whether it is only that too many of the user's jobs are queued already."""
        return any(words in str(self) for words in _TOO_MANY)


@dataclass(frozen=True, slots=True)
class Order:
    """How an array goes to the scheduler, beside what its cells ask for."""

    conf: Mapping[str, Any]  # hydra.launcher
    name: str
    throttle: int
    after: str | None = None  # the id of an array that ends first
    gpus: bool = True  # the partition has some


def submit(sweep: Path, array: Array, order: Order) -> Array:
    """Submit an array and note its id.

    Raises:
        Refused: sbatch does not take it; the array's file is gone again.
    """
    array = arrays.create(sweep, array)
    path = str(arrays.path_of(sweep, array.number).absolute())
    executor = _executor(sweep, array, order)
    try:
        with _clean_environment():
            jobs = executor.map_array(node.run_task, [path] * len(array.tasks), range(len(array.tasks)))
    except Exception as error:  # submitit raises what it likes
        arrays.delete(sweep, array)
        raise Refused(_last_sentence(str(error))) from error
    array = replace(array, job=jobs[0].job_id.split("_")[0], submitted_unix_s=time.time())
    arrays.save(sweep, array)
    return array


def _executor(sweep: Path, array: Array, order: Order) -> Any:
    import submitit  # a quarter of a second

    logging.getLogger("submitit").setLevel(logging.WARNING)
    executor = submitit.AutoExecutor(folder=sweep / arrays.FOLDER / "jobs", cluster="slurm")
    executor.update_parameters(**_parameters(array, order))
    return executor


def _parameters(array: Array, order: Order) -> dict[str, Any]:
    """Return submitit's parameters: Hydra's launcher keys, the cells' resources before them."""
    conf, asked = order.conf, array.resources
    limit_min = time_limit_min(asked, max(map(len, array.tasks)), conf["timeout_min"])
    cpus = asked["cpus"] or conf["cpus_per_task"]
    extra = {"requeue": True, **conf["additional_parameters"]}
    if order.after:
        extra["dependency"] = f"afterany:{order.after}"
    chosen = {
        **{key: value for key, value in conf.items() if key not in _NOT_SBATCH},
        "name": order.name,
        "timeout_min": limit_min,
        "cpus_per_task": cpus,
        "mem_gb": asked["mem_gb"] or conf["mem_gb"],
        "gpus_per_node": (conf["gpus_per_node"] or asked["gpus"] or None) if order.gpus else None,
        "tasks_per_node": 1,
        "array_parallelism": order.throttle,
        # without it srun gives the job's one step one core, whatever the job has (since SLURM 22.05)
        "srun_args": [f"--cpus-per-task={cpus}"] if cpus else None,
        "signal_delay_s": warning_s(limit_min, conf["signal_delay_s"]) if array.resumes else 0,
        "stderr_to_stdout": True,
        "wckey": None,
        "additional_parameters": extra,
    }
    return {
        key if key in _BASE else f"slurm_{key}": value
        for key, value in chosen.items()
        if value is not None or key == "wckey"
    }


def job_name(specs: list[CellSpec]) -> str:
    """Return the name that `squeue` shows: gradbench, the first cell, and how many more."""
    plain = unicodedata.normalize("NFKD", specs[0].name.replace("·", ".")).encode("ascii", "replace").decode()
    more = f"+{len(specs) - 1}" if len(specs) > 1 else ""
    return f"gradbench.{plain}"[:_NAME_CHARS] + more


@contextlib.contextmanager
def _clean_environment() -> Iterator[None]:
    """Hide what an enclosing allocation set: its jobs would inherit cores, memory and ranks that are not theirs."""
    hidden = {name: value for name, value in os.environ.items() if _leaks(name)}
    before = os.environ.get("PYTHONPATH")
    try:
        for name in hidden:
            del os.environ[name]
        if CONF.parent.name != "gradbench":  # a checkout: its jobs shall find it wherever they start
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(CONF.parent), before)))
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # sbatch's, which the error holds
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.update(hidden)
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before


def _leaks(name: str) -> bool:
    return name.startswith(("SLURM_", "SRUN_", "SUBMITIT_")) and name != "SLURM_CONF"


def _last_sentence(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if "sbatch: error:" in line] or lines or ["sbatch failed"]
    return told[-1].removeprefix("sbatch: error: ")
