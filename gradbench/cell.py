"""The composition root of one cell: config -> objects -> gate, audit, training -> result."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradbench import resume
from gradbench.assembly import Cell, device_name, recipe
from gradbench.facts import at_work
from gradbench.loop import Diverged, Loop
from gradbench.outcome import Cancelled, GateFailed, classify, headline
from gradbench.probe.allocator import peaks_of
from gradbench.probe.nvml import gpu_uuid
from gradbench.probe.peak import peak_flops
from gradbench.probe.phases import PhaseLog
from gradbench.probe.recording import Recording
from gradbench.probe.timer import PhaseTimer
from gradbench.progress import Progress
from gradbench.ranks import Ranks, has_lost_another
from gradbench.record import GateReport, Outcome, Result
from gradbench.rng import RngState
from gradbench.tracking import disk

ON_STOP = "GRADBENCH_ON_STOP"
"""What SIGTERM and SIGUSR2 are for: `save` where the scheduler sends them, else they cancel the attempt."""

PATIENCE_S, _POLL_S = 5.0, 0.1
"""How long a rank that misses another one waits for its last words, and how often it looks."""


def run_attempt(attempt: Path) -> Result:
    """Run the cell of an attempt folder to its end, whatever that is, and write `result.json` last.

    An attempt that has begun already goes on from its checkpoint; without one it begins again. Ordinary deaths (an
    exception, divergence, a refused allocation, SIGTERM) are returned, not raised.

    Where several processes train the cell, each calls this. The first rank writes what they have found together, and
    whoever fails alone what it failed of, unless another was first: the others may notice it by failing as well.
    """
    progress, ranks = Progress(attempt), Ranks.mine()
    with progress.stoppable():
        try:
            if ranks.world == 1:
                (attempt / disk.RESULT).unlink(missing_ok=True)  # how it stopped the last time is not how it ends
            outcome, reason = _run(disk.load_config(attempt), progress, ranks)
            together, speaks = True, ranks.first
        except BaseException as error:
            traceback.print_exc()
            outcome, reason = classify(error, progress.phase)
            together = isinstance(error, Cancelled)
            speaks = ranks.first if together else not (has_lost_another(error) and _another_speaks(attempt))
        if ranks.world > 1:
            progress.facts["rank"] = ranks.rank
        if ranks.first and outcome is not Outcome.PREEMPTED:
            progress.examine()
        result = progress.result(outcome, reason)
        if speaks:
            _say(attempt, result, ranks)
        if together:
            ranks.wait()  # who leaves before the result is there has died
    return result


def _another_speaks(attempt: Path) -> bool:
    """Give whoever is gone, or looks after it, time to say why; tell whether somebody has."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s and not (attempt / disk.RESULT).exists():
        time.sleep(_POLL_S)
    return (attempt / disk.RESULT).exists()


def _say(attempt: Path, result: Result, ranks: Ranks) -> None:
    """Write a result; of several ranks the first word stands, which `lost`, by a `status` elsewhere, never is."""
    known = disk.load_result(attempt)
    taken_for_dead = known is not None and known.outcome is Outcome.LOST
    with contextlib.suppress(FileExistsError):
        disk.save_result(attempt, result, replace=ranks.world == 1 or taken_for_dead)
    if result.outcome is not Outcome.PREEMPTED:
        resume.discard(attempt)


def _run(config: Mapping[str, Any], progress: Progress, ranks: Ranks) -> tuple[Outcome, str | None]:
    for record, _ in disk.read_points(progress.attempt):
        progress.add(record)
    ranks.meet()
    with _recorded(config, progress, ranks) as recording:
        phases = recording.phases if recording else None
        training = _resume(config, progress, ranks)
        if training is None:
            progress.begin_again()
            training = _begin(config, progress, ranks, phases)
        training.loop.phases, training.loop.peaks = phases, peaks_of(training.cell.device)
        if recording:
            recording.ready()
        try:
            _train(training, progress, ranks)
        except Diverged as error:
            return Outcome.DIVERGED, str(error)
    if training.loop.done < training.loop.updates:
        return _stop(training.loop, progress, ranks)
    return Outcome.OK, _unproven(progress.facts.get("gate"))


@contextlib.contextmanager
def _recorded(config: Mapping[str, Any], progress: Progress, ranks: Ranks) -> Iterator[Recording | None]:
    """Sample, from the first rank, the processes and GPUs of all ranks on its machine."""
    here = socket.gethostname()
    mine = [(pid, gpu) for host, pid, gpu in ranks.gather((here, os.getpid(), _gpu())) if host == here]
    hz = config["probe"]["hz"]
    if not (hz and ranks.first):
        yield None
        return
    gpus = list(dict.fromkeys(gpu for _, gpu in mine if gpu))
    with Recording(progress.attempt, hz, gpus, [pid for pid, _ in mine]) as recording:
        try:
            yield recording
        finally:
            progress.notes += [note for note in recording.notes if note not in progress.notes]


def _gpu() -> str | None:
    """Return the UUID of the GPU that this process computes on, as NVML writes it; None for a CPU."""
    return gpu_uuid(str(torch.cuda.get_device_properties().uuid)) if torch.cuda.is_available() else None


@dataclass(frozen=True)
class _Training:
    """A cell that is ready for its next update."""

    cell: Cell
    loop: Loop
    timer: PhaseTimer


def _begin(config: Mapping[str, Any], progress: Progress, ranks: Ranks, phases: PhaseLog | None) -> _Training:
    """Prove the cell, and set its training up."""
    span = phases.span if phases else contextlib.nullcontext
    progress.facts |= recipe()
    with span("set-up"):
        cell = Cell(config, ranks)
        progress.updates = len(cell.sizes)
        progress.facts |= cell.facts()
    if config["gate"]["enabled"]:
        with span("gate"):
            _prove(cell, progress)
    if config["probe"]["audit"]:
        progress.phase = "audit"
        with span("audit"):
            cost = cell.audit()
        progress.memory = cost.memory
        progress.facts["flops"] = {"update": cost.flops_per_update, "recomputed": cost.recompute_flops_per_update}
        progress.facts["peak_flops_per_s"] = peak_flops(
            progress.facts["device"], config["precision"], tf32=torch.backends.cuda.matmul.allow_tf32
        )
        if ranks.first:
            disk.write_json(progress.attempt / disk.AUDIT, progress.memory)
    progress.phase = "attach"
    training = _Training(cell, *cell.loop())
    progress.facts["at_work"] = at_work(training.loop.model, cell.accelerator)
    return training


def _prove(cell: Cell, progress: Progress) -> GateReport:
    progress.phase = "gate"
    progress.facts["gate"] = report = cell.gate()
    if not report.passed:
        raise GateFailed(report.reason)
    return report


def _prove_again(cell: Cell, saved: resume.Checkpoint, progress: Progress) -> dict[str, GateReport]:
    """Return the gate's verdict on code that is not what was proved before; nothing where it is the same."""
    if not cell.config["gate"]["enabled"]:
        return {}
    before = saved.facts | saved.facts.get("resumed_with", {})
    if before["code"]["sha256"] == recipe()["code"]["sha256"]:
        return {}
    print("gradbench: the code is not that of before the stop: compared with plain backpropagation again")
    progress.facts |= recipe()
    return {"gate": _prove(cell, progress)}


def _resume(config: Mapping[str, Any], progress: Progress, ranks: Ranks) -> _Training | None:
    """Set the training up as it was when it was stopped; None, with the reason in the log, where that can't be.

    Raises:
        GateFailed: the code has changed meanwhile, and does not compute what it should.
    """
    try:
        saved = _load(progress.attempt, ranks)
        if saved is None:
            return None
        cell = Cell(config, ranks)
        proof = _prove_again(cell, saved, progress)
        training = _Training(cell, *cell.loop())
        saved.restore(training.loop, progress, recipe() | {"data_sha256": cell.data.sha256, "device": device_name()})
        progress.facts |= proof
        if device := progress.facts.get("resumed_with", {}).get("device"):
            progress.notes.append(
                f"from update {saved.update + 1} on it ran on {device}: its times are of both devices"
            )
    except GateFailed:
        raise
    except Exception:
        traceback.print_exc()
        print(f"gradbench: {disk.CHECKPOINT} is of no use: the attempt starts again from the beginning")
        return None
    progress.updates = len(cell.sizes)
    print(f"gradbench: continues after update {saved.update} of {progress.updates}")
    return training


def _load(attempt: Path, ranks: Ranks) -> resume.Checkpoint | None:
    """Return the checkpoint that all ranks have read; without one of them, none of them goes on from it."""
    try:
        saved = resume.load(attempt)
    except Exception:
        ranks.any(True)
        raise
    if ranks.any(saved is None):
        return None
    return saved


def _stop(loop: Loop, progress: Progress, ranks: Ranks) -> tuple[Outcome, str]:
    """Save a training that was stopped between two updates, if whoever stopped it will start it again."""
    if os.environ.get(ON_STOP) != "save":
        raise Cancelled
    stopped = f"stopped by the scheduler after update {loop.done} of {loop.updates}"
    rng = ranks.gather(RngState.now().state_dict())
    if not ranks.first:
        return Outcome.PREEMPTED, stopped
    try:
        resume.save(progress.attempt, resume.Checkpoint.of(loop, progress, rng))
    except Exception as error:  # a full disk, or a method whose state is not plain data
        traceback.print_exc()
        start = "the beginning" if loop.start is None else f"update {loop.start}"
        return Outcome.PREEMPTED, f"{stopped}; could not be saved ({headline(error)}), starts again from {start}"
    return Outcome.PREEMPTED, f"{stopped}; saved, and continues from there"


def _unproven(report: GateReport | None) -> str | None:
    """Return what a reader must know of a result that was not compared with plain backpropagation."""
    if report is None:
        return "not compared with plain backpropagation: gate.enabled=false"
    return report.reason


def _train(training: _Training, progress: Progress, ranks: Ranks) -> None:
    """Train to the end, or until some rank is asked to stop; the first one writes the points."""
    loop, timer = training.loop, training.timer
    progress.peaks = loop.peaks
    with contextlib.closing(disk.Spool(progress.attempt)) if ranks.first else contextlib.nullcontext() as spool:
        try:
            for record in loop.run(
                training.cell.batches(start=loop.start or 0), lambda: ranks.any(progress.stop_asked)
            ):
                if spool is not None:
                    spool.append(record)
                progress.add(record)
        except BaseException:
            progress.phase = timer.phase or "training"
            raise
