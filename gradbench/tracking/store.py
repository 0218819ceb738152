"""The tracking store: the one module that imports mlflow."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy
from sqlalchemy.pool import StaticPool

from gradbench.tracking.address import Address
from gradbench.tracking.mapping import ATTEMPT, CELL, SWEEP_KEY, Point

# mlflow reads these while it is imported. A dead server must cost seconds (MLflow's default is 247 s), and a request
# must not be repeated behind our back: a repeated `create` is a second run.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "15"

from mlflow.entities import Metric, Param, Run, RunTag, ViewType
from mlflow.exceptions import MlflowException
from mlflow.store.db import utils as db_utils
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

for _name in ("mlflow", "alembic"):  # they report what we report in one line, in many
    logging.getLogger(_name).setLevel(logging.CRITICAL)

METRICS_PER_BATCH, WORDS_PER_BATCH = 1000, 100  # MLflow's limits
_REFUSED = frozenset({"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE", "BAD_REQUEST"})


class Unavailable(Exception):
    """The store does not answer, or answers nobody: everything has to wait."""


class Refused(Exception):
    """The store answered, and does not take this: only what was sent is concerned."""


class Found(NamedTuple):
    """The runs that a store holds of a sweep."""

    parent: str | None
    children: Mapping[tuple[str, str], str]  # run ids by cell id and attempt
    deleted: frozenset[str]  # those of the children that somebody deleted in the UI


class Store:
    """One experiment of one tracking store."""

    def __init__(self, address: Address, experiment: str) -> None:
        """Connect; create the database and the experiment where they are missing. Any number of processes may at once.

        Raises:
            Unavailable: the store does not answer.
            Refused: the experiment can't be used.
        """
        self.key = address.key
        with _translated():
            if address.database is not None:
                create_database(address.database)
            self._client = MlflowClient(tracking_uri=address.uri)
            self._experiment = self._experiment_id(experiment, address.artifacts)

    def _experiment_id(self, name: str, artifacts: Path | None) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name, artifacts and artifacts.as_uri()))
            except MlflowException as error:
                found = self._client.get_experiment_by_name(name)  # another process was first
                if found is None:
                    raise error
        if found.lifecycle_stage != "active":
            raise Refused(f"tracking.experiment={name} was deleted in the UI; restore it there or choose another name")
        return str(found.experiment_id)

    def find(self, sweep_key: str) -> Found:
        """Return what the store holds of a sweep."""
        parent, children, deleted = None, {}, set()
        for run in self._search(f"tags.`{SWEEP_KEY}` = '{sweep_key}'"):
            tags, is_deleted = run.data.tags, run.info.lifecycle_stage != "active"
            if CELL in tags:
                children[tags[CELL], tags[ATTEMPT]] = run.info.run_id
                deleted |= {run.info.run_id} if is_deleted else set()
            elif not is_deleted:
                parent = run.info.run_id
        return Found(parent, children, frozenset(deleted))

    def _search(self, query: str) -> Iterator[Run]:
        token = None
        with _translated():
            while True:
                page = self._client.search_runs([self._experiment], query, ViewType.ALL, page_token=token)
                yield from page
                token = page.token
                if not token:
                    return

    def create(self, name: str, tags: Mapping[str, str], started_unix_s: float, parent: str | None = None) -> str:
        """Create a run, in state RUNNING, and return its id."""
        nested = {MLFLOW_PARENT_RUN_ID: parent} if parent else {}
        with _translated():
            run = self._client.create_run(self._experiment, _ms(started_unix_s), {**tags, **nested}, run_name=name)
        return str(run.info.run_id)

    def log(self, run: str, points: Sequence[Point]) -> None:
        """Add at most METRICS_PER_BATCH finite values; one that the store has already is not added again."""
        metrics = [Metric(point.key, point.value, point.t_ms, point.step) for point in points]
        with _translated():
            self._client.log_batch(run, metrics=metrics)

    def set_params(self, run: str, params: Mapping[str, str]) -> None:
        """Set what never changes; the same values again are no change."""
        with _translated():
            for piece in _pieces([Param(key, value) for key, value in params.items()]):
                self._client.log_batch(run, params=piece)

    def set_tags(self, run: str, tags: Mapping[str, str]) -> None:
        """Set what may change."""
        with _translated():
            for piece in _pieces([RunTag(key, value) for key, value in tags.items()]):
                self._client.log_batch(run, tags=piece)

    def set_status(self, run: str, status: str) -> None:
        """Set the status of a run that has not ended."""
        with _translated():
            self._client.update_run(run, status=status)

    def end(self, run: str, status: str, ended_unix_s: float) -> None:
        """End a run."""
        with _translated():
            self._client.set_terminated(run, status, _ms(ended_unix_s))

    def upload(self, run: str, file: Path) -> None:
        """Copy a file into the run's artifacts."""
        with _translated():
            self._client.log_artifact(run, str(file))


def create_database(path: Path) -> None:
    """Create an MLflow database at `path` unless there is one; whoever looks sees a whole one or none.

    MLflow builds a schema by some seventy migrations, which fail when two processes run them on one file. They run
    here in memory, which also spares their many waits for the disk; the finished file is then put in place.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        _migrate_into(Path(temporary))
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        with contextlib.suppress(FileExistsError):  # another process was first, and its file is as good
            os.link(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _migrate_into(file: Path) -> None:
    engine = sqlalchemy.create_engine("sqlite://", poolclass=StaticPool)
    db_utils._initialize_tables(engine)  # what MlflowClient would call on the file itself
    connection = engine.raw_connection()
    with contextlib.closing(sqlite3.connect(file)) as target:
        connection.driver_connection.backup(target)  # type: ignore[union-attr]
    connection.close()
    engine.dispose()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Turn what mlflow raises into `Unavailable` or `Refused` with one line."""
    try:
        yield
    except MlflowException as error:
        kind = Refused if error.error_code in _REFUSED else Unavailable
        raise kind(_one_line(error)) from error
    except (OSError, sqlalchemy.exc.SQLAlchemyError, sqlite3.Error) as error:
        raise Unavailable(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    cause = re.search(r"Caused by \w+\((.*)\)+$", text)  # what lies under urllib3's layers
    return (cause[1].rsplit(": ", 1)[-1].strip("'\")") if cause else text)[:400]


def _pieces(items: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(items), WORDS_PER_BATCH):
        yield items[start : start + WORDS_PER_BATCH]


def _ms(unix_s: float) -> int:
    return round(unix_s * 1000)
