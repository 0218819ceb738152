"""Sweep folders as a driver and its cells would leave them, without training anything."""

import json
import socket
import subprocess
import sys
import time

from gradbench.record import CellSpec, EvalRecord, Outcome, Result, StepRecord
from gradbench.tracking import disk

T0_UNIX_S = 1_790_000_000.25
DEAD = {"host": socket.gethostname(), "pid": 2**22 + 1, "started_unix_s": 1.0, "boot_unix_s": 0.0}


def make_spec(cell_id="0123456789ab", name="vit·adam·standard·s0", **axes):
    axes = {"model": "vit", "optimizer": "adam", "strategy": "standard", "seed": 0, **axes}
    science = {"model": {"_target_": "gradbench.model.vit.Vit", "depth": 2}, "optimizer": {"lr": 0.001}, "seed": 0}
    return CellSpec(id=cell_id, name=name, axes=axes, science=science, config={**science, "train": {"updates": 4}})


def make_sweep(runs, specs, uri=None, *, name="20261201-120000", experiment="gradbench", alive=False):
    sweep = runs / name
    sweep.mkdir(parents=True)
    driver = disk.this_process() if alive else DEAD
    content = {
        "sweep": name,
        "command": ["python", "-m", "gradbench", "-m", "optimizer=glob(*)"],
        "created_unix_s": T0_UNIX_S,
        "git": {"commit": "c0ffee", "dirty": False, "diff": ""},
        "versions": {},
        "driver": driver,
        "launcher": "local",
        "tracking": {"uri": uri, "experiment": experiment},
        "runs": str(runs),
        "cells": [{"id": s.id, "name": s.name, "axes": s.axes, "skip": s.skip, "from": None} for s in specs],
    }
    disk.write_json(sweep / disk.SWEEP, content)
    for spec in specs:
        disk.save_cell(sweep, spec)
    return sweep


def make_attempt(sweep, spec, steps=4, outcome=Outcome.OK, *, started=True, reason=None, **metrics):
    attempt = disk.new_attempt(sweep / spec.id)
    disk.save_config(attempt, spec.config)
    if started:
        disk.save_state(attempt)
        (attempt / disk.LOG).write_text("hello\n")
    add_steps(attempt, range(1, steps + 1))
    if outcome is not None:
        end(attempt, outcome, steps, reason, **metrics)
    return attempt


def add_steps(attempt, updates, **changes):
    spool = disk.Spool(attempt)
    for update in updates:
        spool.append(step(update, **changes))
    spool.append(EvalRecord(max(updates, default=0), T0_UNIX_S + 99, 1.5, 20, 20, 0.1))
    spool.close()


def add_step(attempt, update, **changes):
    spool = disk.Spool(attempt)
    spool.append(step(update, **changes))
    spool.close()


def step(update, **changes):
    values = {
        "t_unix_s": T0_UNIX_S + update,
        "loss": 2.0 / update,
        "grad_norm": 1.0,
        "lr": 0.001,
        "samples": 8,
        "tokens": 16,
        "micro_batches": 1,
        "forwards": 1,
        "backwards": 1,
        "step_s": 0.01,
        "data_s": 0.001,
        "forward_s": 0.004,
        "backward_s": 0.004,
        "optimizer_s": 0.001,
        "warmup": False,
    }
    return StepRecord(update=update, **{**values, **changes})


def end(attempt, outcome=Outcome.OK, updates=4, reason=None, **metrics):
    metrics = {f"final/{key}": value for key, value in metrics.items()} or {"final/train_loss": 0.5}
    ended = T0_UNIX_S + 100
    result = Result(outcome, reason, updates, updates, T0_UNIX_S, ended, socket.gethostname(), metrics)
    disk.save_result(attempt, result)


def start_uploader(sweep):
    """Start the real process, as the driver does, and return it with the line it said first."""
    words = [sys.executable, "-m", "gradbench.tracking.uploader", str(sweep)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def close(process, timeout_s=60):
    """Close the uploader's stdin and return its exit code and what it said on stderr."""
    _, said = process.communicate(timeout=timeout_s)
    return process.returncode, said


def wait_for(condition, timeout_s=30):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.05)


def confirmed_json(folder):
    return json.loads((folder / "mlflow.json").read_text())
