"""What the tests of the local launcher share: jobs whose cells are `targets.py`, and how to wait."""

import time

from gradbench.record import CellSpec, Outcome
from gradbench.sweep.job import Ended, Job
from gradbench.sweep.local.channel import Graces
from gradbench.sweep.local.launcher import LocalLauncher
from gradbench.tracking import disk


def make_job(sweep, name, do, arg=None, resources=None, updates=3):
    config = {"do": do, "arg": arg, "train": {"updates": updates}}
    spec = CellSpec(id=name, name=f"the cell {name}", axes={}, science={}, config=config, updates=3)
    return Job(disk.save_cell(sweep, spec), spec, *([resources] if resources else []))


def make_jobs(sweep, *cells):
    return [make_job(sweep, f"c{n:02d}", *cell) for n, cell in enumerate(cells)]


def launcher(workers=2, **options):
    graces = Graces(stop_s=0.5, exit_s=0.5)
    settings = {"workers": workers, "threads": 1, "gpus": (), "target": "targets:run", "graces": graces, **options}
    return LocalLauncher(**settings)


def results(events):
    return {event.job.spec.id: event.result for event in events if isinstance(event, Ended)}


def outcomes(events):
    return {cell: result.outcome for cell, result in results(events).items()}


def on_disk(sweep):
    """Return the outcome that each cell has on disk."""
    return {path.parent.parent.name: disk.load_result(path.parent).outcome for path in sweep.glob("*/*/result.json")}


def all_cancelled(sweep, number):
    return on_disk(sweep) == {f"c{n:02d}": Outcome.CANCELLED for n in range(number)}


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def wait_until_they_run(sweep, *cells):
    """Wait until the first attempts of cells whose target tells so (`hang`, `polite`, `wait`) have begun."""
    wait_for(lambda: all((sweep / cell / "1" / "here").exists() for cell in cells))
