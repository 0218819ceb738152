"""Several processes train one cell: real data, real models and gloo, through the zygote that runs cells anywhere."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from gradbench.ranks import Ranks, backend_of, device_index, has_lost_another
from gradbench.record import Outcome
from gradbench.sweep.ending import posthumous
from gradbench.sweep.local.channel import Graces, Request
from gradbench.sweep.local.worker import Worker
from gradbench.tracking import disk

ROOT = Path(__file__).parents[1]
PRELOAD = (
    "torch._dynamo",
    "transformers",
    "gradbench.model.vit",
    "gradbench.data.images",
    "gradbench.strategy.standard",
)
BARE = ("gate.enabled=false", "probe.audit=false", "probe.hz=0")


class Zygote:
    """The driver's end of one zygote, with answers by attempt."""

    def __init__(self):
        self.worker = Worker("tests.ranks_target:run", Graces(stop_s=20, exit_s=2), PRELOAD)
        self.ends = {}

    def start(self, attempt, processes, **limits):
        request = Request(str(attempt), attempt.parent.name, processes=processes, **limits)
        self.worker.send({"run": dataclasses.asdict(request)})

    def end(self, attempt):
        """Return how an attempt ended, in time."""
        end_s = time.monotonic() + 120
        while str(attempt) not in self.ends:
            assert time.monotonic() < end_s, "it hangs"
            messages = self.worker.receive(1.0)
            assert messages is not None, self.worker.output()
            self.ends |= {message["ended"]: message["result"] for message in messages if "ended" in message}
        return disk.to_result(self.ends.pop(str(attempt)))

    def run(self, attempt, processes=2, **limits):
        self.start(attempt, processes, **limits)
        return self.end(attempt)


@pytest.fixture(scope="module")
def zygote():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        zygote = Zygote()
        yield zygote
        zygote.worker.close()


@pytest.fixture
def cell_of(attempt_of):
    """Return `cell_of(*overrides, accident={...})`: a new attempt folder, to which something may happen."""

    def made(*overrides, **more):
        attempt = attempt_of(*overrides)
        disk.save_config(attempt, {**disk.load_config(attempt), **more})
        return attempt

    return made


def points(attempt):
    """Return what a training computed, in order; times are not part of it."""
    records = [record for record, _ in disk.read_points(attempt)]
    return [(r.update, r.loss, r.samples, r.tokens, getattr(r, "grad_norm", 0)) for r in records]


def ends(attempt):
    """Return what each rank had in the end."""
    return [torch.load(path, weights_only=True) for path in sorted(attempt.glob("end*.pt"))]


def assert_same_training(many, one, **tolerance):
    """Hold every rank's parameters, and the one curve, against one process's."""
    for end in ends(many):
        torch.testing.assert_close(end["weights"], ends(one)[0]["weights"], **tolerance)
    ours, theirs = points(many), points(one)
    assert [(update, samples, tokens) for update, _, samples, tokens, _ in ours] == [
        (update, samples, tokens) for update, _, samples, tokens, _ in theirs
    ]
    for mine, its in zip(ours, theirs, strict=True):
        assert mine[1] == pytest.approx(its[1], rel=1e-5)
        assert mine[4] == pytest.approx(its[4], rel=1e-5)


@pytest.mark.parametrize("strategy", ["standard", "accumulation", "checkpointing"])
def test_two_processes_are_one_with_the_same_batch(zygote, cell_of, strategy):
    cell = ("optimizer=sgd", "optimizer.lr=0.01", f"strategy={strategy}", *BARE)
    two, one = cell_of(*cell), cell_of(*cell)
    zygote.start(two, 2)
    zygote.start(one, 1)
    ended = [zygote.end(attempt) for attempt in (two, one)]
    assert [result.outcome for result in ended] == [Outcome.OK, Outcome.OK]
    assert [result.facts["processes"] for result in ended] == [2, 1]
    assert_same_training(two, one, rtol=1e-5, atol=1e-7)
    for fact in ("first_batch_sha256", "initial_weights_sha256", "effective_batch", "samples_planned"):
        assert ended[0].facts[fact] == ended[1].facts[fact]


def test_a_cell_has_one_of_everything(zygote, cell_of):
    attempt = cell_of("strategy=accumulation", "strategy.steps=2", "model=llama")
    result = zygote.run(attempt)
    assert (result.outcome, result.reason, result.updates_done) == (Outcome.OK, None, 4)
    assert result.facts["gate"]["samples"] == 8, "of both"
    assert result.metrics["final/peak_bytes"] == disk.read_json(attempt / disk.AUDIT)["peak_bytes"] > 0
    kinds = [(type(record), record.update) for record, _ in disk.read_points(attempt)]
    assert sorted(kinds, key=str) == sorted(set(kinds), key=str)
    assert len(kinds) == 4 + 3
    files = {path.name for path in attempt.iterdir() if path.suffix != ".pt"}
    ours = (disk.CONFIG, disk.STATE, disk.STEPS, disk.AUDIT, disk.TRACE, disk.LOG, disk.RESULT)
    assert files == {*ours, "log.rank1.txt"}


def test_the_gate_compares_what_both_have_computed(zygote, cell_of):
    wrong = cell_of("strategy=checkpointing", "strategy.preserve_rng_state=false", "model.dropout=0.3")
    result = zygote.run(wrong)
    assert result.outcome is Outcome.FAILED
    assert result.reason.startswith("checkpointing is not exact: ")


def test_a_gate_that_does_not_fit_one_device_takes_less_on_all(zygote, cell_of):
    result = zygote.run(cell_of(accident={"what": "little_memory"}))
    assert (result.outcome, result.facts["gate"]["samples"]) == (Outcome.OK, 2), result.reason


def test_three_processes_sum_in_another_order(zygote, cell_of):
    cell = ("train.batch_size=9", "strategy=checkpointing", "optimizer=sgd", "optimizer.lr=0.01")
    three, one = cell_of(*cell), cell_of(*cell)
    assert [zygote.run(three, 3).outcome, zygote.run(one, 1).outcome] == [Outcome.OK, Outcome.OK]
    assert_same_training(three, one, rtol=1e-5, atol=1e-7)


def test_each_process_draws_masks_of_its_own(zygote, cell_of):
    cell = ("model.dropout=0.3", "optimizer=sgd", *BARE)
    attempts = [cell_of(*cell) for _ in range(3)]
    results = [zygote.run(attempt, processes) for attempt, processes in zip(attempts, (2, 2, 1), strict=True)]
    assert {result.outcome for result in results} == {Outcome.OK}
    assert points(attempts[0]) == points(attempts[1])
    assert points(attempts[0])[0] == points(attempts[2])[0], "none in the held-out loss before the first update"
    assert points(attempts[0])[1] != points(attempts[2])[1]
    assert not torch.equal(*(end["random"] for end in ends(attempts[0])))


def test_L8_two_cells_of_two_processes_at_once(zygote, cell_of):
    attempts = [cell_of(*BARE, accident={"what": "pause", "update": 2}) for _ in range(2)]
    for attempt in attempts:
        zygote.start(attempt, 2)
    wait_for(lambda: all((attempt / "here").exists() for attempt in attempts))
    for attempt in attempts:
        (attempt / "go").touch()
    assert [zygote.end(attempt).outcome for attempt in attempts] == [Outcome.OK, Outcome.OK]
    assert points(attempts[0]) == points(attempts[1])


def test_L7_a_process_that_sees_one_gpu_uses_number_0(zygote, cell_of, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert device_index(local_rank=3, visible=1) == 0
    assert [device_index(rank, visible=4) for rank in range(4)] == [0, 1, 2, 3]
    assert [device_index(rank, visible=2) for rank in range(4)] == [0, 1, 0, 1]
    assert device_index(local_rank=3, visible=0) == 3, "a CPU"
    attempt = cell_of(*BARE, accident={"what": "one_gpu"})
    assert zygote.run(attempt).outcome is Outcome.OK
    assert [end["env"]["LOCAL_RANK"] for end in ends(attempt)] == ["0", "0"], "which is what Accelerate reads"


@pytest.mark.parametrize(
    ("accident", "outcome", "reason"),
    [
        ({"what": "die"}, Outcome.LOST, "rank 1 killed by signal 9 (SIGKILL)"),
        ({"what": "die", "rank": 0}, Outcome.LOST, "killed by signal 9 (SIGKILL)"),
        ({"what": "fail"}, Outcome.FAILED, "ZeroDivisionError: on purpose (gradbench/loop.py:"),
        ({"what": "fail", "rank": 0}, Outcome.FAILED, "ZeroDivisionError: on purpose (gradbench/loop.py:"),
        ({"what": "run_out"}, Outcome.OOM, "out of memory in training: the device allocator refused "),
        ({"what": "diverge"}, Outcome.DIVERGED, "loss is nan at update 3"),
    ],
)
def test_what_happens_to_one_happens_to_the_cell_and_nobody_hangs(zygote, cell_of, accident, outcome, reason):
    attempt = cell_of(*BARE, accident=accident)
    begin_s = time.monotonic()
    result = zygote.run(attempt)
    assert result.outcome is outcome
    assert result.reason.startswith(reason)
    assert result.updates_done == (3 if outcome is Outcome.DIVERGED else 2)
    assert disk.load_result(attempt) == result
    assert time.monotonic() - begin_s < 60


def stopped(zygote, attempt, word):
    """Run an attempt of two processes, tell it to stop while they are in update 3, and return how it ended."""
    zygote.start(attempt, 2, saves=word == "save")
    wait_for((attempt / "here").exists)
    zygote.worker.send({word: str(attempt)})
    time.sleep(0.5)  # rank 0 is told, and waits for the other, which has to finish its update first
    (attempt / "go").touch()
    return zygote.end(attempt)


@pytest.mark.parametrize("optimizer", ["sgd", "cg"])
def test_a_saved_training_goes_on_to_the_bit_on_both(zygote, cell_of, optimizer):
    cell = (f"optimizer={optimizer}", "model.dropout=0.2", "train.updates=6", *BARE)
    whole, parts = cell_of(*cell), cell_of(*cell, accident={"what": "pause"})
    assert zygote.run(whole).outcome is Outcome.OK
    first = stopped(zygote, parts, "save")
    assert (first.outcome, first.updates_done) == (Outcome.PREEMPTED, 3)
    assert first.reason == "stopped by the scheduler after update 3 of 6; saved, and continues from there"
    disk.save_config(parts, {key: value for key, value in disk.load_config(parts).items() if key != "accident"})
    disk.reopen_attempt(parts.parent, int(parts.name))
    last = zygote.run(parts, saves=True)
    assert (last.outcome, last.facts["resumed_at"]) == (Outcome.OK, [3])
    assert points(parts) == points(whole)
    assert_same_training(parts, whole, rtol=0, atol=0)
    assert not (parts / disk.CHECKPOINT).exists()


def test_another_number_of_processes_starts_again(zygote, cell_of):
    attempt = cell_of("train.updates=6", *BARE, accident={"what": "pause"})
    stopped(zygote, attempt, "save")
    disk.reopen_attempt(attempt.parent, int(attempt.name))
    result = zygote.run(attempt, processes=1)
    assert (result.outcome, result.updates_done, "resumed_at" in result.facts) == (Outcome.OK, 6, False)
    assert "Unfit: 2 processes made it, 1 would continue it" in (attempt / disk.LOG).read_text()
    assert [update for update, *_ in points(attempt)] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]


def test_a_stop_ends_both_after_the_same_update(zygote, cell_of):
    attempt = cell_of("train.updates=6", *BARE, accident={"what": "pause"})
    result = stopped(zygote, attempt, "stop")
    assert (result.outcome, result.reason, result.updates_done) == (Outcome.CANCELLED, "the user stopped it", 3)
    assert not (attempt / disk.CHECKPOINT).exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_is_told_all_obey_after_the_same_update(zygote, cell_of, rank):
    attempt = cell_of("train.updates=6", *BARE, accident={"what": "be_told_to_stop", "rank": rank})
    result = zygote.run(attempt, saves=True)
    assert (result.outcome, result.updates_done) == (Outcome.PREEMPTED, 3)
    assert (attempt / disk.CHECKPOINT).exists()


def test_a_limit_ends_both(zygote, cell_of):
    attempt = cell_of("train.updates=100000", *BARE)
    assert zygote.run(attempt, time_limit_s=4).outcome is Outcome.TIMEOUT


def test_a_cell_that_somebody_took_for_lost_runs_on(zygote, cell_of):
    attempt = cell_of(*BARE, accident={"what": "pause"})
    zygote.start(attempt, 2)
    wait_for((attempt / "here").exists)
    disk.save_result(attempt, posthumous(attempt, Outcome.LOST, "a status elsewhere did not see it"))
    (attempt / "go").touch()
    assert zygote.end(attempt).outcome is Outcome.OK
    assert disk.load_result(attempt).outcome is Outcome.OK


def test_processes_talk_from_host_to_host_whatever_their_devices():
    for processes, devices, on_gpus in ((2, 2, "nccl"), (1, 2, "nccl"), (2, 1, "gloo"), (2, 0, "gloo")):
        backend = torch.distributed.Backend(backend_of(processes, devices))
        group = torch.distributed.distributed_c10d.BackendConfig(backend)
        assert group.get_device_backend_map() == {"cpu": "gloo", "cuda": on_gpus}


def test_one_process_alone_needs_nobody():
    alone = Ranks.mine()
    alone.meet()
    alone.wait()
    assert (alone, alone.first, alone.any(True), alone.sum(1, 2.5), alone.gather("x")) == (
        Ranks(0, 1), True, True, [1, 2.5], ["x"]
    )  # fmt: skip
    assert not torch.distributed.is_initialized()


def test_a_lost_connection_is_told_from_an_error_of_ones_own():
    lost = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1")
    assert has_lost_another(lost)
    assert has_lost_another(torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0."))
    assert not has_lost_another(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def wait_for(condition, seconds=60):
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.02)
