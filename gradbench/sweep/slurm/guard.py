"""Act on what the breaker says: hold the cells that wait, or keep them off a node."""

from __future__ import annotations

from gradbench.sweep.job import Ended
from gradbench.sweep.slurm import command
from gradbench.sweep.slurm.breaker import FIRST, QUICK_DEATHS, Breaker, Exclude, Hold
from gradbench.sweep.slurm.command import SlurmError
from gradbench.sweep.slurm.follow import Follower, is_held
from gradbench.tracking import disk

IDS_PER_CALL = 500


class Guard:
    """Watches the ends of a sweep's cells."""

    def __init__(self, follower: Follower, exclude: str | None = None) -> None:
        """Watch what `follower` tells; `exclude` names the nodes that the user avoids already."""
        self._follower, self._breaker = follower, Breaker()
        self._excluded = [exclude] if exclude else []
        self._reasons: set[str | None] = set()
        self.cause: str | None = None  # why nothing more should start
        self.held: frozenset[str] = frozenset()  # jobs that wait until the user says more

    @property
    def excluded(self) -> str | None:
        """The nodes that no job shall go to, as sbatch takes them."""
        return ",".join(self._excluded) or None

    def judge(self, ended: Ended) -> list[str]:
        """Act on an end if it is the one too many; return what the user is to hear."""
        if self.cause or self._is_told(ended):
            return []
        state = disk.load_state(ended.attempt) or {}
        found = self._breaker.note(ended.result, state.get("node") or ended.result.host)
        if isinstance(found, Exclude):
            return self._exclude(found)
        return self._hold(found) if found else []

    def _is_told(self, ended: Ended) -> bool:
        """Tell whether a cell that never began ends with a job whose death is known: that is no second one."""
        reason, known = ended.result.reason, ended.result.reason in self._reasons
        self._reasons.add(reason)
        return known and not (ended.attempt / disk.STATE).exists()

    def _exclude(self, found: Exclude) -> list[str]:
        self._excluded.append(found.node)
        pending = sorted(self._follower.pending())
        trouble = _each(pending, "update", f"ExcNodeList={self.excluded}", prefix="JobId=")
        said = f"{found.node}: {QUICK_DEATHS} cells died there at once"
        if trouble:
            said += f", and scontrol says: {trouble}"
        elif pending:
            said += "; what waits goes to other nodes (launch.on_failure=continue never excludes one)"
        return [said]

    def _hold(self, found: Hold) -> list[str]:
        where = f", all on {found.node}" if found.node else ""
        self.cause = f"the first {FIRST} cells died of one error{where}: {found.reason}"
        pending = sorted(self._follower.pending())
        if not pending:
            return []
        trouble = _each(pending, "hold")
        self.held = frozenset(job for job, seen in self._follower.pending().items() if is_held(seen))
        arrays = " ".join(dict.fromkeys(job.partition("_")[0] for job in sorted(self.held)))
        return [
            self.cause,
            f"{len(self.held)} jobs that wait are held: scontrol release {arrays} lets them go as they are; to change "
            "what all of them ask for, cancel the sweep and rerun --failed; launch.on_failure=continue never holds"
            + (f" (scontrol: {trouble})" if trouble else ""),
        ]


def _each(jobs: list[str], verb: str, *words: str, prefix: str = "") -> str | None:
    """Have scontrol do something with every job; return its complaint, if any: some may have started meanwhile."""
    trouble = None
    for start in range(0, len(jobs), IDS_PER_CALL):
        ids = prefix + ",".join(jobs[start : start + IDS_PER_CALL])
        try:
            command.run("scontrol", verb, ids, *words)
        except SlurmError as error:
            trouble = str(error)
    return trouble
