"""Sweep folders: made once, found again."""

from __future__ import annotations

import fcntl
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gradbench.code import fingerprint, git_state
from gradbench.config import UserError
from gradbench.record import CellSpec, Result
from gradbench.tracking import disk

LOCK = ".rerun.lock"
RECORDED = ("gradbench", "torch", "transformers", "accelerate", "mlflow", "hydra-core", "submitit")


@dataclass(frozen=True)
class Order:
    """What a command asks of a sweep, beside its cells."""

    command: tuple[str, ...]
    launcher: str
    tracking: Mapping[str, Any]  # uri, experiment


def create(runs: Path, order: Order, cells: Sequence[CellSpec], finished: Mapping[str, Path]) -> Path:
    """Make the folder of a new sweep, with its cells; `finished` names the attempts of others that count for it.

    Raises:
        UserError: the runs folder cannot be written.
    """
    try:
        folder = _new_folder(runs)
        for cell in cells:
            if cell.id not in finished and cell.skip is None:
                disk.save_cell(folder, cell)
        disk.write_json(folder / disk.SWEEP, _content(folder, order, cells, finished))
    except OSError as error:
        raise UserError(f"runs={runs}: cannot be written ({error.strerror or error}); name another folder") from error
    return folder


def _new_folder(runs: Path) -> Path:
    """Make `<runs>/<time>`; the first of several in one second gets the plain name, the others a number."""
    runs.mkdir(parents=True, exist_ok=True)
    name, number = time.strftime("%Y%m%d-%H%M%S"), 1
    while True:
        folder = runs / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _content(folder: Path, order: Order, cells: Sequence[CellSpec], finished: Mapping[str, Path]) -> dict[str, Any]:
    runs = folder.parent
    return {
        "sweep": folder.name,
        "command": order.command,
        "created_unix_s": time.time(),
        "code": fingerprint(),
        "git": git_state(),
        "versions": versions(),
        "driver": disk.this_process(),
        "launcher": order.launcher,
        "tracking": order.tracking,
        "runs": str(runs.absolute()),
        "cells": [
            {
                "id": cell.id,
                "name": cell.name,
                "axes": cell.axes,
                "overrides": cell.overrides,
                "skip": cell.skip,
                "updates": cell.updates,
                "from": str(finished[cell.id].relative_to(runs)) if cell.id in finished else None,
            }
            for cell in cells
        ],
    }


@contextmanager
def choosing(sweep: Path) -> Iterator[None]:
    """Wait until nobody else chooses cells of a sweep to rerun: the next who does sees what this one has started."""
    with (sweep / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def may_be_live(sweep: Path) -> bool:
    """Tell whether some cell of a sweep may still run: jobs of a cluster outlive their driver."""
    content = load(sweep)
    return bool(content.get("launcher") == "slurm" or disk.is_alive(content["driver"]))


def discard(sweep: Path) -> None:
    """Remove the folder of a sweep of which nothing has started."""
    shutil.rmtree(sweep, ignore_errors=True)


def take_over(sweep: Path, last: Mapping[str, int]) -> None:
    """Note that this process drives the sweep now, unless the one that did lives: it answers for cells that wait.

    `last` are the newest attempts of the cells, by id, after which it is going to make others.
    """
    content, me = load(sweep), disk.this_process()
    driver = content["driver"] if disk.is_alive(content["driver"]) else me
    disk.write_json(sweep / disk.SWEEP, {**content, "driver": driver, "rerunning": {"driver": me, "last": last}})


def claimed(content: Mapping[str, Any]) -> Mapping[str, int]:
    """Return the cells of a sweep that a living process is going to rerun, with the attempts that come before."""
    claim = content.get("rerunning")
    return claim["last"] if claim and disk.is_alive(claim["driver"]) else {}


def versions() -> dict[str, str]:
    """Return the versions of what a result depends on."""
    found = {"python": platform.python_version()}
    for name in RECORDED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def load(sweep: Path) -> dict[str, Any]:
    """Return the content of a sweep's `sweep.json`."""
    try:
        return disk.load_sweep(sweep)
    except FileNotFoundError:
        raise UserError(f"{sweep.name}: no sweep of this name in {sweep.parent}") from None


def all_sweeps(runs: Path) -> list[Path]:
    """Return the sweep folders, oldest first."""
    try:
        entries = list(runs.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"runs={runs}: {error.strerror}; name another folder") from error
    return sorted((path for path in entries if (path / disk.SWEEP).is_file()), key=_age)


def _age(sweep: Path) -> tuple[str, int]:
    day, _, rest = sweep.name.partition("-")
    clock, _, number = rest.partition("-")
    return f"{day}-{clock}", int(number) if number.isdecimal() else 1


def find(runs: Path, name: str | None) -> Path:
    """Return the sweep called `name`, or the newest."""
    sweeps = all_sweeps(runs)
    if not sweeps:
        raise UserError(f"runs={runs}: no sweep here yet")
    if name is None:
        return sweeps[-1]
    for sweep in sweeps:
        if sweep.name == name:
            return sweep
    raise UserError(f"{name}: no sweep of this name in {runs}; the newest are {', '.join(s.name for s in sweeps[-3:])}")


def newest(runs: Path, say: Callable[[str], object]) -> Path:
    """Return the newest sweep that can be read; `say` takes a line for each newer one that can't.

    Raises:
        Damaged: none can.
    """
    damaged: list[disk.Damaged] = []
    for sweep in reversed(all_sweeps(runs)):
        try:
            load(sweep)
        except disk.Damaged as error:
            damaged.append(error)
        else:
            for each in damaged:
                say(f"gradbench: {each}")
            return sweep
    raise damaged[0] if damaged else UserError(f"runs={runs}: no sweep here yet")


def finished(runs: Path, cells: Iterable[CellSpec]) -> dict[str, Path]:
    """Return, for each cell that has a final result anywhere in `runs`, the attempt that holds the newest one.

    A cell that is to pass the gate, or to be audited, is not finished by an attempt that did without.
    """
    found: dict[str, Path] = {}
    wanted = {cell.id: cell for cell in cells}
    for sweep in all_sweeps(runs):
        for cell_id in wanted.keys() & {path.name for path in sweep.iterdir()}:
            attempt = final_attempt(sweep / cell_id, wanted[cell_id].config)
            if attempt is not None:
                found[cell_id] = attempt
    return found


def final_attempt(cell: Path, asked: Mapping[str, Any]) -> Path | None:
    """Return the newest attempt of a cell that has a final result with all that is `asked` for, if there is one."""
    for attempt in reversed(disk.attempts(cell)):
        result = disk.load_result(attempt)
        if result is not None and result.outcome.final and _suffices(attempt, result, asked):
            return attempt
    return None


def _suffices(attempt: Path, result: Result, asked: Mapping[str, Any]) -> bool:
    """Tell whether an attempt was to go through all that is asked for: it may have died in it, of memory."""
    through = {
        ("gate", "enabled"): "gate" in result.facts,
        ("probe", "audit"): "final/peak_activations_bytes" in result.metrics,
    }
    lacking = [key for key, told in through.items() if _is_on(asked, key) and not told]
    if not lacking:
        return True
    try:
        config = disk.load_config(attempt)
    except FileNotFoundError:
        return False
    return all(_is_on(config, key) for key in lacking)


def _is_on(config: Mapping[str, Any], key: tuple[str, str]) -> bool:
    room, name = key
    return bool(config.get(room, {}).get(name))
