"""Where the tracking store is: what `tracking.uri` may say. It imports no mlflow, so that a mistake is told at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

DATABASE, ARTIFACTS = "mlflow.db", "artifacts"


@dataclass(frozen=True, slots=True)
class Address:
    """A tracking store."""

    uri: str  # as mlflow takes it
    key: str  # names the store in mlflow.json and in messages: no password, and no path of a runs folder that may move
    database: Path | None = None  # of an SQLite store
    artifacts: Path | None = None  # beside an SQLite store; a server decides for itself


def resolve(uri: str | None, runs: Path) -> Address:
    """Return the store that `uri` (`tracking.uri`) names; None is the one embedded in the folder `runs`.

    Raises:
        ValueError: one line, for anything but null, sqlite:///FILE and http(s)://HOST.
    """
    if uri is None:
        return _sqlite(runs / DATABASE, "embedded")
    if uri.startswith("sqlite:///") and len(uri) > len("sqlite:///"):
        path = Path(uri.removeprefix("sqlite:///"))
        return _sqlite(path, f"sqlite:///{path.absolute()}")
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https") and parts.hostname:
        return Address(uri, f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}")
    file_store = " (MLflow has given up its file store)" if parts.scheme in ("", "file") else ""
    raise ValueError(
        f"tracking.uri={uri}: no such store{file_store}; allowed: null (a database in the runs folder), "
        "sqlite:///FILE.db, http://HOST:PORT, https://HOST"
    )


def _sqlite(path: Path, key: str) -> Address:
    path = path.absolute()
    return Address(f"sqlite:///{path}", key, database=path, artifacts=path.parent / ARTIFACTS)
