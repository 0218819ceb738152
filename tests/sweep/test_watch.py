"""`status --watch`: what fits into the terminal while cells run, everything once they have ended."""

import io

from rich.console import Console

from gradbench.record import Outcome
from gradbench.sweep import watch
from tests.sweep.test_table import a_cell


def lines(cells, height):
    console = Console(file=io.StringIO(), width=120, height=height)
    console.print(watch.screen(cells, "20261201-120000", height))
    return [line.strip() for line in console.file.getvalue().splitlines()]


def test_a_sweep_that_fits_is_in_its_own_order():
    cells = [a_cell(name="first"), a_cell(None, name="second", state="running", started=1.0)]
    shown = [line.split()[0] for line in lines(cells, 20) if line.startswith(("first", "second"))]
    assert shown == ["first", "second"]


def test_of_a_sweep_that_does_not_fit_what_runs_is_seen_and_all_is_counted():
    ended = [a_cell(name=f"ended{n}") for n in range(20)]
    waiting = [a_cell(None, name=f"waits{n}", state="pending") for n in range(20)]
    running = [a_cell(None, name=f"runs{n}", state="running", started=1.0) for n in range(2)]
    shown = lines([*ended, *waiting, *running], 14)
    assert len(shown) <= 14
    names = [line.split()[0] for line in shown if line.startswith(("ended", "waits", "runs"))]
    assert names == ["runs0", "runs1", "waits0", "waits1", "waits2", "waits3"]
    assert shown[-1] == "42 cells: 20 ok, 20 pending, 2 running"


def test_it_ends_with_the_whole_table_when_all_have_ended(monkeypatch, tmp_path):
    running, failed = a_cell(None, state="running", started=1.0), a_cell(Outcome.FAILED, reason="no", rerun="again x")
    said = iter([[running], [failed], [failed]])
    monkeypatch.setattr(watch, "REFRESH_S", 0)
    monkeypatch.setattr(watch.status, "of_sweep", lambda _sweep, scheduler=None: next(said))
    console = Console(file=io.StringIO(), width=120, height=20, force_terminal=True)
    watch.show(tmp_path, console, live=True)
    end = console.file.getvalue().splitlines()
    assert end[-2:] == ["vit·adam·standard·s0: failed: no", "    again x"]


def test_what_cannot_be_compared_is_seen_while_cells_run():
    ended = [a_cell(name=f"ended{n}", facts={"processes": n}) for n in (1, 2)]
    shown = lines([*ended, *[a_cell(None, name=f"waits{n}", state="pending") for n in range(20)]], 14)
    assert len(shown) <= 14
    assert shown[-1] == "not comparable by time and memory: the cells ran on 1 process (1); 2 processes (1)"
