"""The process that copies a sweep into the tracking store while it runs: `python -m gradbench.tracking.uploader SWEEP`.

Its stdout is one line: `ready` when the store has the sweep's parent run, `offline` when the store does not answer.
It ends after a last pass when its stdin is closed, and exits with 1 when the store lacks something then.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradbench.tracking import confirmed, disk
from gradbench.tracking.address import resolve
from gradbench.tracking.copier import Copier
from gradbench.tracking.lock import exclusive
from gradbench.tracking.store import Refused, Store, Unavailable

PACE_S, SLOWEST_PACE_S = 1.0, 5.0
"""Between two passes; a large sweep or a slow store is visited less often."""
LOAD = 0.1
"""The share of the time that passes should take."""
LONGEST_WAIT_S = 30.0
"""Between two tries of a store that does not answer."""
LAST_TRY_S = 4.0
"""How long an uploader that never had its turn waits for the other one to leave."""


class Patience:
    """Lets a store fail: warns once, and says how long to wait before the next try."""

    def __init__(self, name: str) -> None:
        """Start with good hope."""
        self._name = name
        self.down = False
        self.wait_s = PACE_S

    def attempt(self, step: Callable[[], None]) -> bool:
        """Do `step` and tell whether it succeeded; tracking must never end a sweep, so nothing is raised."""
        started_s = time.monotonic()
        try:
            step()
        except (Unavailable, Refused) as error:
            self._failed(str(error))
        except Exception as error:  # a full disk, a surprise of MLflow's: neither may be louder than the results
            self._failed(f"{type(error).__name__}: {error}")
        else:
            self._succeeded(time.monotonic() - started_s)
        return not self.down

    def _failed(self, reason: str) -> None:
        if not self.down:
            line = " ".join(reason.split())
            warn(f"tracking: {self._name} does not take the results ({line}); they are kept, and sent when it does")
        self.wait_s = min(LONGEST_WAIT_S, 2 * self.wait_s) if self.down else PACE_S
        self.down = True

    def _succeeded(self, took_s: float) -> None:
        if self.down:
            warn(f"tracking: {self._name} takes the results again")
        self.down, self.wait_s = False, min(SLOWEST_PACE_S, max(PACE_S, took_s / LOAD))


def warn(line: str) -> None:
    """Tell the user something in one line."""
    print(line, file=sys.stderr, flush=True)


def connect(sweep: Path, content: Mapping[str, Any]) -> Store:
    """Return the store that a sweep.json names; the embedded one lies beside the sweep, wherever that was moved."""
    tracking = content["tracking"]
    return Store(resolve(tracking["uri"], sweep.parent), tracking["experiment"])


def serve(sweep: Path) -> int:
    """Copy a sweep until stdin is closed; return the exit code.

    Where another uploader is on it (of the driver of a rerun, or of another job), that one sees all but what comes
    while it leaves.
    """
    leave_at_s = math.inf
    while time.monotonic() < leave_at_s:
        with exclusive(sweep) as mine:
            if mine:
                return _serve(sweep)
        if leave_at_s < math.inf:
            time.sleep(PACE_S)
        elif _closed_within(PACE_S):
            leave_at_s = time.monotonic() + LAST_TRY_S
    return 0


def _serve(sweep: Path) -> int:
    patience = Patience(resolve(disk.load_sweep(sweep)["tracking"]["uri"], sweep.parent).key)
    copier = Copier(sweep, connect, warn)
    print("ready" if patience.attempt(copier.prepare) else "offline", flush=True)
    patience.wait_s = PACE_S  # what it took to make a database says nothing of a pass
    os.nice(10)  # the cells that train on the same cores come first
    while not _closed_within(patience.wait_s):
        patience.attempt(copier.copy)
    complete = patience.attempt(copier.copy) and patience.attempt(lambda: copier.finish(over=True))
    return 0 if complete and not confirmed.pending(sweep) else 1


def _closed_within(seconds: float) -> bool:
    """Wait, and tell whether stdin was closed meanwhile."""
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        readable, _, _ = select.select([0], [], [], left_s)
        if readable and not os.read(0, 4096):
            return True
    return False


def sync(sweeps: Sequence[Path]) -> bool:
    """Send what the stores have not confirmed of these sweeps; print a line each; return whether nothing is left.

    A damaged file concerns its own sweep only.
    """
    waiting, results = 0, []
    for sweep in sweeps:
        try:
            if confirmed.is_behind(sweep):
                waiting += 1
                results.append(_sync_one(sweep))
        except disk.Damaged as error:
            warn(f"gradbench: {error}")
            results.append(False)
    if not waiting and all(results):
        print(f"{len(sweeps)} sweeps: MLflow has everything")
    return all(results)


def _sync_one(sweep: Path) -> bool:
    with exclusive(sweep) as mine:
        if not mine:
            print(f"{sweep.name}: its sweep is running, and sends by itself")
            return True
        before = len(confirmed.pending(sweep))
        copier = Copier(sweep, connect, warn)
        try:
            copier.copy()
            copier.finish(over=False)
        except (Unavailable, Refused, ValueError) as error:
            print(f"{sweep.name}: {len(confirmed.pending(sweep))} of its runs are not in MLflow: {error}")
            return False
        left = len(confirmed.pending(sweep))
        print(f"{sweep.name}: {before - left} runs sent" + (f", {left} refused" if left else ""))
        return not left


def main(argv: Sequence[str]) -> int:
    """Serve the sweep that the command line names."""
    # Ctrl-C, and what SLURM sends to all processes of a job, are for the one that closes our stdin when it is done
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        return serve(Path(argv[0]))
    except ValueError as error:
        warn(str(error))
        return 2


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # all is on disk, and Python needs half a second to take mlflow apart, for which a sweep would wait
