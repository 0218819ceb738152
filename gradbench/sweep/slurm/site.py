"""What this SLURM is like: its limits and partitions, asked once before anything is submitted."""

from __future__ import annotations

import os
import pwd
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradbench.config import UserError
from gradbench.sweep.slurm import command
from gradbench.sweep.slurm.answers import seconds
from gradbench.sweep.slurm.command import SlurmError

_SETTING = re.compile(r"(\w+)\s*= (.*)")
_NUMBER = re.compile(r"\d+")
_GPU = re.compile(r"(?:^|,)gpu\b")
_LIMITS_ARE_ENFORCED = frozenset({"limits", "qos", "safe"})


def is_here() -> bool:
    """Tell whether `sbatch` is on the PATH and has been told of a cluster, whether that answers or not."""
    if shutil.which("sbatch") is None:
        return False
    try:
        command.run("scontrol", "ping")
    except SlurmError as error:
        return "configuration" not in str(error)
    return True


@dataclass(frozen=True, slots=True)
class Partition:
    """A queue of the site."""

    name: str
    default: bool
    max_time_min: float | None  # None: no limit
    gpus: bool  # some node of it has gres/gpu
    preempt_mode: str  # what befalls its jobs where a more important one needs the place: OFF, REQUEUE, CANCEL, ...


@dataclass(frozen=True, slots=True)
class Site:
    """The facts that decide how a sweep is cut into job arrays."""

    cluster: str  # jobs are known here only
    max_array_size: int  # array indices are below it
    max_job_count: int  # of all users
    max_submit: int | None  # of this user, array tasks counted one by one; None: no limit
    accounting: bool
    kill_wait_s: int  # between SIGTERM and SIGKILL at the time limit
    partitions: tuple[Partition, ...]

    @classmethod
    def ask(cls, account: str | None = None, qos: str | None = None) -> Site:
        """Ask SLURM; `account` and `qos` are those that jobs will name, None the user's default.

        Raises:
            SlurmError: slurmctld does not answer, or there is no SLURM here.
        """
        settings = dict(_SETTING.findall(command.run("scontrol", "show", "config")))
        cluster = settings.get("ClusterName", "")
        limits = not _LIMITS_ARE_ENFORCED.isdisjoint(settings.get("AccountingStorageEnforce", "").split(","))
        return cls(
            cluster=cluster,
            max_array_size=_number(settings, "MaxArraySize"),
            max_job_count=_number(settings, "MaxJobCount"),
            max_submit=_max_submit(cluster, account, qos) if limits else None,
            accounting=settings.get("AccountingStorageType", "").endswith("slurmdbd"),
            kill_wait_s=_number(settings, "KillWait"),
            partitions=_partitions(),
        )

    def chosen(self, names: str | None) -> tuple[Partition, ...]:
        """Return the partitions that `names` (`gpu` or `gpu,long`; None: the default) stands for.

        Raises:
            UserError: there is no such partition, or no default.
        """
        known = {partition.name: partition for partition in self.partitions}
        allowed = ", ".join(known) or "none"
        if not names:
            default = tuple(partition for partition in self.partitions if partition.default)
            if not default:
                raise UserError(f"hydra.launcher.partition: this SLURM has no default; name one of {allowed}")
            return default
        for name in names.split(","):
            if name not in known:
                raise UserError(f"hydra.launcher.partition={name}: no such partition; allowed: {allowed}")
        return tuple(known[name] for name in names.split(","))

    def has_gpus(self, names: str | None) -> bool:
        """Tell whether jobs in these partitions can have GPUs."""
        return any(partition.gpus for partition in self.chosen(names))


def _number(settings: Mapping[str, str], key: str) -> int:
    """Return the number in `1001` or `30 sec`."""
    found = _NUMBER.match(settings.get(key, ""))
    if found is None:
        raise SlurmError(f"scontrol show config: no {key} that can be read")
    return int(found[0])


def _partitions() -> tuple[Partition, ...]:
    """Return the partitions; sinfo prints one line for every kind of node in one."""
    found: dict[str, Partition] = {}
    for line in command.run("sinfo", "--all", "--noheader", "--format=%P|%l|%M|%G").splitlines():
        starred, time_limit, preempt_mode, gres = line.strip().split("|", 3)
        name, limit_s = starred.removesuffix("*"), seconds(time_limit)
        gpus = bool(_GPU.search(gres)) or (name in found and found[name].gpus)
        found[name] = Partition(name, starred != name, limit_s and limit_s / 60, gpus, preempt_mode)
    return tuple(found.values())


def _max_submit(cluster: str, account: str | None, qos: str | None) -> int | None:
    """Return the limit of the user's association, or of the QOS, whose word goes before; None where nobody tells."""
    try:
        associations = _associations(cluster)
        mine = [each for each in associations if each[1] == (account or each[0])]
        named = {qos} if qos else {default for _, _, _, default in mine}
        return _least(_qos_limits(named)) or _least([limit for _, _, limit, _ in mine])
    except SlurmError:  # sbatch will say
        return None


def _associations(cluster: str) -> list[list[str]]:
    """Return default account, account, limit and default QOS for each of the user's associations."""
    columns = "format=DefaultAccount,Account,MaxSubmitJobs,DefaultQOS"
    words = ("-n", "-P", "show", "user", _user(), "withassoc", f"cluster={cluster}", columns)
    return [line.split("|") for line in command.run("sacctmgr", *words).splitlines() if line.count("|") == 3]


def _qos_limits(names: set[str]) -> list[str]:
    columns = "format=Name,MaxSubmitJobsPerUser"
    lines = command.run("sacctmgr", "-n", "-P", "show", "qos", columns).splitlines()
    return [line.split("|")[1] for line in lines if line.split("|")[0] in names]


def _least(limits: Sequence[str]) -> int | None:
    return min((int(limit) for limit in limits if limit.isdecimal()), default=None)


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name
