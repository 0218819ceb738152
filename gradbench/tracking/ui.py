"""Starts MLflow's UI on the store in use."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO
from urllib.parse import urlencode

import psutil

from gradbench.tracking.address import Address, resolve

HOST = "127.0.0.1"
START_S, STOP_S = 90.0, 5.0
ENVIRONMENT: Mapping[str, str] = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # a dozen processes and 2 GB for evaluations that nobody asks for
}


def ui(runs: Path, uri: str | None, port: int = 5000) -> int:
    """Serve the UI until Ctrl-C, on `port` or a free one; print its address. A server's own UI is only named.

    Raises:
        ValueError: one line: there is no store, or the server does not come up.
    """
    address = resolve(uri, runs)
    if address.database is None:
        print(f"tracking.uri is a server, which has the UI: {address.key}")
        return 0
    if not address.database.exists():
        raise ValueError(f"{address.database}: no results yet; the first sweep makes it (another folder: runs=...)")
    taken = not _is_free(port)
    port = _free_port() if taken else port
    print(f"starting MLflow's UI{' (the asked port is taken)' if taken else ''} ...", flush=True)
    with contextlib.suppress(KeyboardInterrupt), serving(command(address, port), port) as process:
        print(f"http://{HOST}:{port}/{_page(address.database)}\n(Ctrl-C ends it)", flush=True)
        return process.wait()
    return 0


def _page(database: Path) -> str:
    """Return the part of the address behind the slash: every attempt of the newest experiment, best first.

    At its bare address MLflow 3 shows an empty page for language-model traces; sorted by date, it folds the attempts
    under their sweeps.
    """
    newest = (
        "SELECT experiment_id FROM experiments WHERE lifecycle_stage = 'active' ORDER BY last_update_time DESC, 1 DESC"
    )
    with contextlib.closing(sqlite3.connect(database)) as connection:
        experiment = connection.execute(newest).fetchone()
    query = {"workflowType": "machine_learning", "orderByKey": "metrics.`final/eval_loss`", "orderByAsc": "true"}
    return f"#/experiments/{experiment[0] if experiment else 0}/runs?{urlencode(query)}"


def command(address: Address, port: int) -> list[str]:
    """Return the command line of a small server on an SQLite store."""
    return [
        *(sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", address.uri, "--artifacts-destination", str(address.artifacts)),
    ]


@contextlib.contextmanager
def serving(words: Sequence[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server from the moment it answers to the end of the context, whose end is that of all its processes."""
    with tempfile.TemporaryFile() as log, _terminable():
        process = subprocess.Popen(
            words, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait_until_healthy(process, port, log)
            yield process
        finally:
            _end_group(process)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end us as Ctrl-C does, so that it leaves no server behind."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise ValueError(f"MLflow's server ended with code {process.returncode}: {_last_line(log)}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=2):
            if _listens(process, port):
                return
        time.sleep(0.1)
    raise ValueError(f"MLflow's server did not answer within {START_S:.0f} s: {_last_line(log)}")


def _listens(process: subprocess.Popen[bytes], port: int) -> bool:
    """Tell whether the process or a child of it serves the port: another server may have taken it meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
        return any(found.laddr.port == port for member in family for found in member.net_connections("tcp"))
    return False


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port
