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

from gradbench.code import PACKAGE
from gradbench.config import CONF
from gradbench.record import CellSpec
from gradbench.sweep.slurm import arrays, node
from gradbench.sweep.slurm.arrays import Array
from gradbench.sweep.slurm.plan import time_limit_min, warning_s
from gradbench.tracking import disk

_BASE = {field.name for field in fields(BaseQueueConf)}
_NOT_SBATCH = {"_target_", "submitit_folder", "max_num_timeout", "kind"}
_NAME_CHARS = 200
_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", disk.JOB_VARIABLE)
_OF_ITS_GPUS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL")
_ERROR = "sbatch: error: "
_TOO_MANY = ("MaxSubmitJob", "GrpSubmitJob", "MaxJobCount", "Slurm temporarily unable to accept job")


class Refused(Exception):
    """`sbatch` did not take an array; the message is what it says."""

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
        Refused: sbatch does not take it; nothing of it is left.
    """
    try:
        array = arrays.create(sweep, array)
    except OSError as error:
        raise Refused(f"{sweep} cannot be written: {error.strerror or error}") from error
    path = str(arrays.path_of(sweep, array.number).absolute())
    executor = _executor(sweep, array, order)
    try:
        with _clean_environment():
            jobs = executor.map_array(node.run_task, [path] * len(array.tasks), range(len(array.tasks)))
    except Exception as error:  # submitit raises what it likes
        arrays.delete(sweep, array)
        raise Refused(_sentences(str(error))) from error
    array = replace(array, job=jobs[0].job_id.split("_")[0], submitted_unix_s=time.time())
    with contextlib.suppress(OSError):  # a full disk: `status` finds the job as that of an array without an answer
        arrays.save(sweep, array)
    return array


def _executor(sweep: Path, array: Array, order: Order) -> Any:
    import submitit  # a quarter of a second

    logging.getLogger("submitit").setLevel(logging.WARNING)
    executor = submitit.AutoExecutor(folder=arrays.folder_of(sweep, array), cluster="slurm")
    executor.update_parameters(**_parameters(array, order))
    executor._executor.update_parameters(wckey=None)  # submitit's own, which a site that has some would refuse
    return executor


def _parameters(array: Array, order: Order) -> dict[str, Any]:
    """Return submitit's parameters: Hydra's launcher keys, the cells' resources before them."""
    conf, asked = order.conf, array.resources
    limit_min = time_limit_min(asked, max(map(len, array.tasks)), conf["timeout_min"])
    cpus, nodes = asked["cpus"] or conf["cpus_per_task"], asked.get("nodes", 1)
    # without the first srun gives the job's one step one core, whatever the job has (since SLURM 22.05); of several
    # tasks the death of one is the end of all
    srun_args = [f"--cpus-per-task={cpus}"] * bool(cpus) + ["--kill-on-bad-exit=1", "--wait=0"] * (nodes > 1)
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
        "nodes": max(nodes, conf["nodes"]),
        "tasks_per_node": 1,
        "array_parallelism": order.throttle,
        "srun_args": srun_args or None,
        "signal_delay_s": warning_s(limit_min, conf["signal_delay_s"]) if array.resumes else 0,
        "stderr_to_stdout": True,
        "additional_parameters": {key: value for key, value in extra.items() if value is not False},
    }
    return {key if key in _BASE else f"slurm_{key}": value for key, value in chosen.items()}


def job_name(specs: list[CellSpec]) -> str:
    """Return the name that `squeue` shows: gradbench, the first cell, and how many more."""
    plain = unicodedata.normalize("NFKD", specs[0].name.replace("·", ".")).encode("ascii", "replace").decode()
    more = f"+{len(specs) - 1}" if len(specs) > 1 else ""
    return f"gradbench.{plain}"[:_NAME_CHARS] + more


@contextlib.contextmanager
def _clean_environment() -> Iterator[None]:
    """Hide what an enclosing allocation set: its jobs would inherit cores, memory and ranks that are not theirs."""
    leaks = _OF_A_JOB + (_OF_ITS_GPUS if "SLURM_JOB_ID" in os.environ else ())
    hidden = {name: value for name, value in os.environ.items() if name.startswith(leaks) and name != "SLURM_CONF"}
    before = os.environ.get("PYTHONPATH")
    try:
        for name in hidden:
            del os.environ[name]
        if CONF.parent != PACKAGE:  # a checkout: its jobs shall find it wherever they start
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


def _sentences(text: str) -> str:
    """Return all that sbatch calls an error: the reason may come before what followed from it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line.partition(_ERROR)[2] for line in lines if _ERROR in line]
    return "; ".join(told) or (lines or ["sbatch failed"])[-1]
