"""Act on what the breaker says: hold the cells that wait, or keep them off a node."""

from __future__ import annotations

from gradbench.sweep.job import Ended
from gradbench.sweep.slurm import command
from gradbench.sweep.slurm.breaker import FIRST, QUICK_DEATHS, Breaker, Exclude, Hold
from gradbench.sweep.slurm.command import SlurmError
from gradbench.sweep.slurm.follow import Follower
from gradbench.tracking import disk

IDS_PER_CALL = 500


class Guard:
    """Watches the ends of a sweep's cells."""

    def __init__(self, follower: Follower) -> None:
        """Watch what `follower` tells."""
        self._follower, self._breaker = follower, Breaker()
        self.held: frozenset[str] = frozenset()  # jobs that wait until the user says more
        self.said: list[str] = []  # what the user is to hear

    def judge(self, ended: Ended) -> None:
        """Act on an end if it is the one too many."""
        if self.held:
            return
        state = disk.read_json(ended.attempt / disk.STATE) or {}
        found = self._breaker.note(ended.result, state.get("node") or ended.result.host)
        if isinstance(found, Exclude):
            self._exclude(found)
        elif isinstance(found, Hold):
            self._hold(found)

    def _exclude(self, found: Exclude) -> None:
        if trouble := _each(self._follower.pending(), "update", f"ExcNodeList={found.node}", prefix="JobId="):
            self.said.append(f"{found.node}: {QUICK_DEATHS} cells died there at once, and scontrol says: {trouble}")
        else:
            self.said.append(f"{found.node}: {QUICK_DEATHS} cells died there at once; what waits goes to other nodes")

    def _hold(self, found: Hold) -> None:
        pending = self._follower.pending()
        if not pending:
            return
        trouble = _each(pending, "hold")
        self.held = frozenset(pending)
        where = f", all on {found.node}" if found.node else ""
        arrays = " ".join(dict.fromkeys(job.partition("_")[0] for job in pending))
        self.said += [
            f"the first {FIRST} cells died of one error{where}: {found.reason}",
            f"{len(pending)} jobs that wait are held: scontrol release {arrays} lets them go, "
            "launch.on_failure=continue never holds" + (f" (scontrol: {trouble})" if trouble else ""),
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
