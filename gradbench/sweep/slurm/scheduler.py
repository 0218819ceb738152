"""One batched question about many jobs: accounting first, the queue for what lives or what accounting does not know.

A job is over when accounting says so for good. What may come back under the same id (preempted, its node dead), and
what neither knows, is over only after two answers of the queue, some seconds apart, in which it did not live.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gradbench.record import Outcome
from gradbench.sweep.slurm import answers, command
from gradbench.sweep.slurm.answers import Seen
from gradbench.sweep.slurm.command import NoAnswer, SlurmError
from gradbench.sweep.slurm.states import Kind, Meaning, meaning

GONE_AFTER_S = 5.0
"""Between the two answers that say that a job is gone; one that is being requeued is in neither list for a moment."""
GONE_WITHOUT_ACCOUNTING_S = 300.0
"""The same while slurmdbd is silent, which may know what became of a job once it is back."""
RETRY_ACCOUNTING_S = 60.0
"""How long accounting that failed is left alone."""
CHUNK = 500
"""Array ids of one call: few enough for any command line."""

GONE = Meaning(Kind.TERMINAL, "gone", Outcome.LOST)
CANCELLED_UNSEEN = Seen("CANCELLED", meaning("CANCELLED"), reason="before it started")
"""Of an array task that accounting doesn't know although it knows its array: one that starts leaves a record."""

_LOOKBACK_S = 365 * 24 * 3600
_NO_SUCH_JOB = "Invalid job id specified"  # squeue's answer when the only job that it is asked for has left


class Scheduler:
    """SLURM, asked about jobs in as few calls as there can be; how often is the caller's choice."""

    trouble: str | None = None
    """Why the last question was not answered in full."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Ask nothing yet; `clock` counts seconds."""
        self._clock = clock
        self._accounting_failed_s = float("-inf")
        self._gone_after_s = GONE_AFTER_S
        self._missing: dict[str, float] = {}  # when the queue first did not have a job alive

    def ask(self, jobs: Iterable[str]) -> dict[str, Seen]:
        """Return what SLURM says of jobs (`123`) and array tasks (`123_4`).

        A job of which nothing is known, not even that it is gone, is left out.
        """
        wanted = list(dict.fromkeys(jobs))
        accounts = self._accounts(wanted)
        queue = self._queue([job for job in wanted if job not in accounts or not _is_over(accounts[job])])
        arrays = {_array_of(job) for job in accounts}
        judged = {job: self._judge(job, accounts.get(job), queue, _array_of(job) in arrays) for job in wanted}
        return {job: seen for job, seen in judged.items() if seen is not None}

    def ask_until_sure(self, jobs: Iterable[str]) -> dict[str, Seen]:
        """Ask, and once more some seconds later about what may be gone: for whoever will not ask again."""
        wanted = list(jobs)
        seen = self.ask(wanted)
        doubtful = [job for job in wanted if job in self._missing and not _is_settled(seen.get(job))]
        if doubtful and self._gone_after_s == GONE_AFTER_S:
            time.sleep(GONE_AFTER_S)
            seen |= self.ask(doubtful)
        return seen

    def _accounts(self, jobs: Sequence[str]) -> dict[str, Seen]:
        """Return what accounting knows; nothing where it is off, forbidden or silent."""
        if self._clock() - self._accounting_failed_s < RETRY_ACCOUNTING_S:
            return {}
        try:
            found = _accounts(jobs)
        except SlurmError as error:
            self._accounting_failed_s = self._clock()
            self._gone_after_s = GONE_WITHOUT_ACCOUNTING_S if isinstance(error, NoAnswer) else GONE_AFTER_S
            return {}
        self._gone_after_s = GONE_AFTER_S
        return found

    def _queue(self, jobs: Sequence[str]) -> dict[str, Seen] | None:
        """Return what the queue has of jobs, None where it does not answer."""
        self.trouble = None
        try:
            return _queue(jobs)
        except SlurmError as error:
            self.trouble = str(error)
            return None

    def _judge(self, job: str, account: Seen | None, queue: Mapping[str, Seen] | None, has_array: bool) -> Seen | None:
        queued = None if queue is None else queue.get(job)
        if queued is not None and queued.meaning.kind is not Kind.TERMINAL:  # asked last, so it knows best
            self._missing.pop(job, None)
            return queued
        over = [each for each in (account, queued) if each is not None and _is_over(each)]
        if over:  # in the queue alone where accounting lags behind
            return over[0]
        known = queued or account
        if known is not None and known.meaning.kind is Kind.UNKNOWN:
            return known
        if queue is not None and self._is_missing_for_long(job):
            if known is not None and known.meaning.may_return:
                return known
            return CANCELLED_UNSEEN if known is None and has_array else Seen(None, GONE)
        return None if known is None else _as_live(known)

    def _is_missing_for_long(self, job: str) -> bool:
        now = self._clock()
        return now - self._missing.setdefault(job, now) >= self._gone_after_s


class Once:
    """The same for whoever asks once: one answer, until it is sure."""

    def __init__(self) -> None:
        """Ask nothing yet."""
        self._scheduler = Scheduler()

    @property
    def trouble(self) -> str | None:
        """Why the question was not answered in full."""
        return self._scheduler.trouble

    def ask(self, jobs: Iterable[str]) -> dict[str, Seen]:
        """Return what SLURM says of jobs; some seconds later where one may be gone."""
        return self._scheduler.ask_until_sure(jobs)


def _is_over(seen: Seen) -> bool:
    return seen.meaning.kind is Kind.TERMINAL and not seen.meaning.may_return


def _is_settled(seen: Seen | None) -> bool:
    return seen is not None and seen.meaning.kind is not Kind.LIVE


def _as_live(seen: Seen) -> Seen:
    """Return what is seen of a job that may come back, until it is known that it does not."""
    return dataclasses.replace(seen, meaning=Meaning(Kind.LIVE, seen.meaning.word))


def _accounts(jobs: Sequence[str]) -> dict[str, Seen]:
    since = time.strftime("%Y-%m-%d", time.localtime(time.time() - _LOOKBACK_S))
    options = ("--federation", "-X", "-n", "-P", f"--starttime={since}", f"--format={','.join(answers.SACCT)}")
    found: dict[str, Seen] = {}
    for ids in _chunks(jobs):
        found.update(answers.of_sacct(command.run("sacct", *options, f"--jobs={ids}")))
    return found


def _queue(jobs: Sequence[str]) -> dict[str, Seen]:
    """Return what the queue has; `--states=all`: what ended in the last minutes, too."""
    columns = ",".join(f"{name}:|" for name in answers.SQUEUE)
    options = ("--federation", "--all", "--noheader", "--states=all", f"--Format={columns}")
    found: dict[str, Seen] = {}
    for ids in _chunks(jobs):
        try:
            found.update(answers.of_squeue(command.run("squeue", *options, f"--jobs={ids}")))
        except SlurmError as error:
            if _NO_SUCH_JOB not in str(error):
                raise
    return found


def _chunks(jobs: Iterable[str]) -> Iterator[str]:
    """Yield comma-separated ids; an array is asked for as one, however many tasks it has."""
    ids = list(dict.fromkeys(_array_of(job) for job in jobs))
    for start in range(0, len(ids), CHUNK):
        yield ",".join(ids[start : start + CHUNK])


def _array_of(job: str) -> str:
    return job.partition("_")[0]
