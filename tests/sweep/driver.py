"""A driver in a process of its own, for tests that send it signals: `driver.py SWEEP WORKERS JSON-list-of-cells`."""

import json
import signal
import sys
from pathlib import Path

from gradbench.sweep.interrupt import interruptible
from gradbench.sweep.job import Started
from tests.sweep.cells import launcher, make_jobs


def main(sweep, workers, cells):
    with interruptible() as stop:
        for event in launcher(int(workers)).run(make_jobs(Path(sweep), *json.loads(cells)), stop):
            word = "started" if isinstance(event, Started) else event.result.outcome
            print(event.job.spec.id, word, flush=True)
    sys.exit(130 if stop.level else 0)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever started the tests may have had it ignored (nohup)
    main(*sys.argv[1:])
