"""The table a sweep ends with."""

import io
import time

import pytest
from rich.console import Console

from gradbench.record import Outcome
from gradbench.sweep import table
from gradbench.sweep.status import CellStatus


def a_cell(outcome=Outcome.OK, name="vit·adam·standard·s0", **more):
    fields = {"attempt": 1, "state": "ended", "axes": {}, "id": "0123456789ab", **more}
    return CellStatus(name=name, outcome=outcome, **fields)


def shown(cells, width=80):
    console = Console(file=io.StringIO(), width=width)
    table.show(console, cells)
    return console.file.getvalue()


def test_a_paper_grid_fits_into_eighty_columns():
    metrics = {"final/eval_loss": 0.44164, "final/peak_bytes": 11.6 * 2**20, "final/step_s": 0.0619}
    text = shown([a_cell(name="modernbert·adadelta·checkpointing·s0", metrics=metrics)])
    assert "…" not in text
    for word in ("cell", "outcome", "eval loss", "peak memory", "step time", "0.4416", "11.6 MiB", "61.9 ms"):
        assert word in text


def test_what_was_not_measured_is_a_dash_never_zero():
    row = next(line for line in shown([a_cell(Outcome.OOM, reason="out of memory")]).splitlines() if "oom" in line)
    assert row.split()[1:] == ["oom", "-", "-", "-"]


def test_a_cell_without_a_result_gets_its_reason_and_command():
    command = "python -m gradbench rerun 0123456789ab --sweep x"
    lines = shown([a_cell(), a_cell(Outcome.FAILED, reason="ValueError: no", rerun=command)]).splitlines()
    assert lines[-3:] == ["2 cells: 1 ok, 1 failed", "vit·adam·standard·s0: failed: ValueError: no", f"    {command}"]


def test_several_cells_without_a_result_get_one_command_for_all():
    command = "python -m gradbench rerun 0123456789ab --sweep x runs=y"
    failed = a_cell(Outcome.FAILED, rerun=command)
    assert (
        shown([failed, failed]).splitlines()[-1] == "all of them: python -m gradbench rerun --failed --sweep x runs=y"
    )


def test_an_ok_that_was_not_compared_says_so():
    cells = [a_cell(reason="not compared"), a_cell(reason="not compared"), a_cell()]
    assert shown(cells).splitlines()[-1] == "2 cells ok, but not compared"


def test_brackets_in_a_name_or_reason_are_shown_as_they_are():
    text = shown([a_cell(Outcome.DIVERGED, name="vit·betas=[0.9,0.99]·s0", reason="loss is nan [x]")])
    assert text.count("betas=[0.9,0.99]") == 2
    assert "loss is nan [x]" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (33.8 * 2**30, "33.8 GiB"), (2**41, "2.0 TiB")],
)
def test_bytes(value, text):
    assert table.in_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.00123, "1.23 ms"), (0.049, "49.0 ms"), (0.5, "500 ms"), (12.3456, "12.3 s")]
)
def test_seconds(value, text):
    assert table.in_seconds(value) == text


def test_while_cells_run_the_table_says_where_and_for_how_long(monkeypatch):
    monkeypatch.setattr(table.time, "time", lambda: 1000.0)
    running = a_cell(None, state="running", host="n1", started=875.0, updates_done=3, updates=9)
    ended = a_cell(Outcome.OK, host="n2", started=800.0, ended=803.0)
    rows = [line.split() for line in shown([running, ended], width=120).splitlines() if "vit" in line]
    assert rows == [
        ["vit·adam·standard·s0", "running", "3/9", "-", "-", "-", "n1", "0:02:05"],
        ["vit·adam·standard·s0", "ok", "-", "-", "-", "n2", "0:00:03"],
    ]
    assert "n2" not in shown([ended])


def test_a_table_of_thousands_is_plain_and_quick():
    running = a_cell(None, state="running", host="n1", started=0.0, updates_done=3, updates=9)
    metrics = {"final/eval_loss": 0.44164, "final/peak_bytes": 11.6 * 2**20, "final/step_s": 0.0619}
    before = time.process_time()
    lines = shown([running, *[a_cell(metrics=metrics)] * 10_000]).splitlines()
    assert time.process_time() - before < 2, "rich takes ten"
    assert lines[0].split("  ")[0] == "cell"
    assert lines[1].split()[:6] == ["vit·adam·standard·s0", "running", "3/9", "-", "-", "-"]
    assert lines[2].split()[:6] == ["vit·adam·standard·s0", "ok", "0.4416", "11.6", "MiB", "61.9"]
    assert len({len(line) for line in lines[:-1]}) == 1
    assert lines[-1] == "10001 cells: 10000 ok, 1 running"


def test_a_cell_that_waits_says_for_what():
    waiting = a_cell(None, state="pending", reason="Resources", updates=9)
    assert "pending (Resources)" in shown([waiting])


def failed(number, reason, options="--sweep y"):
    cell = f"{number:012d}"
    rerun = f"python -m gradbench rerun {cell} {options}"
    return a_cell(Outcome.FAILED, name=f"the cell {number}", id=cell, reason=reason, rerun=rerun)


def test_one_cause_of_many_deaths_is_told_once():
    lines = shown([failed(number, "ValueError: no") for number in range(5)]).splitlines()
    assert lines[-2:] == ["5 x ValueError: no", "all of them: python -m gradbench rerun --failed --sweep y"]


def test_reasons_that_differ_in_names_of_files_and_numbers_are_one_cause():
    gone = [failed(number, f"FileNotFoundError: /data/{number} is gone") for number in range(7)]
    lines = shown([*gone, failed(7, "ValueError: no")], 200).splitlines()
    assert lines[-5:] == [
        "7 x FileNotFoundError: /data/0 is gone (one of 7 alike)",
        f"    python -m gradbench rerun {' '.join(cell.id for cell in gone)} --sweep y",
        "the cell 7: failed: ValueError: no",
        "    python -m gradbench rerun 000000000007 --sweep y",
        "all of them: python -m gradbench rerun --failed --sweep y",
    ]


def test_few_deaths_are_told_one_by_one():
    assert " x " not in shown([failed(number, "ValueError: no") for number in range(4)])


def test_what_some_need_more_of_is_not_asked_for_all():
    more = [failed(number, "too little", "--sweep y resources.mem_gb=8 runs=z") for number in range(5)]
    less = [failed(number, "too little", "--sweep y resources.mem_gb=4 runs=z") for number in range(5, 10)]
    lines = shown([*more, *less], 200).splitlines()
    assert [line.split("--sweep")[1] for line in lines[-5:] if "--sweep" in line] == [
        " y resources.mem_gb=8 runs=z",
        " y resources.mem_gb=4 runs=z",
        " y runs=z",
    ]


def test_what_is_behind_a_cell_is_shown_with_what_it_waits_for():
    preempted = a_cell(None, state="preempted", reason="Resources", updates_done=12, updates=60)
    assert table.word(preempted).plain == "preempted 12/60 (Resources)"
    odd = a_cell(None, state="pending", reason="ReqNodeNotAvail, UnavailableNodes:n[1-400]", updates=60)
    assert table.word(odd).plain == "pending (ReqNodeNotAvail, Unavailabl...)"


def with_facts(number, **facts):
    axes = {"model": "vit", "seed": 0}
    return a_cell(id=f"{number:012d}", axes=axes, facts=facts)


def test_what_cannot_be_compared_is_told_below_the_table():
    cells = [with_facts(0, processes=1), with_facts(1, processes=2)]
    said = "not comparable by time and memory: the cells ran on 1 process (1); 2 processes (1)"
    assert shown(cells, 200).splitlines()[-1] == said
    console = Console(file=io.StringIO(), width=200)
    table.show(console, cells[:1], beside=cells)
    assert console.file.getvalue().splitlines()[-1] == said
    assert said not in shown(cells[:1], 200)
