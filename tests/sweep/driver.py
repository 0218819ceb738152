"""A driver in a process of its own, for tests that send it signals: `driver.py SWEEP WORKERS JSON-list-of-cells`."""

import json
import sys
from pathlib import Path

from gradbench.record import CellSpec
from gradbench.sweep.local import Job, LocalLauncher, Started, interruptible
from gradbench.sweep.zygote import Graces
from gradbench.tracking import disk


def make_job(sweep, name, do, arg=None, resources=None, updates=3):
    config = {"do": do, "arg": arg, "train": {"updates": updates}}
    spec = CellSpec(id=name, name=name, axes={}, science={}, config=config)
    return Job(disk.save_cell(sweep, spec), spec, *([resources] if resources else []))


def main(sweep, workers, cells):
    jobs = [make_job(Path(sweep), f"c{n:02d}", *cell) for n, cell in enumerate(json.loads(cells))]
    launcher = LocalLauncher(workers=int(workers), threads=1, gpus=(), target="targets:run", graces=Graces(1.0, 1.0))
    with interruptible() as stop:
        for event in launcher.run(jobs, stop):
            word = "started" if isinstance(event, Started) else event.result.outcome
            print(event.job.spec.id, word, flush=True)
    sys.exit(130 if stop.level else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
