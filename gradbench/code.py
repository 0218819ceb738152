"""Which code a result is of: the hash of gradbench's own files and, in a checkout, its commit."""

from __future__ import annotations

import functools
import hashlib
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradbench.config import CONF

PACKAGE = Path(__file__).parent


@functools.cache
def fingerprint() -> Mapping[str, Any]:
    """Return `sha256` of the modules and YAML files and, in a checkout, `commit`, and whether it is `dirty`.

    A process keeps what it was told first: it goes on with the modules that it has imported.
    """
    git = git_state() or {}
    return {"sha256": _sha256()} | {key: git[key] for key in ("commit", "dirty") if key in git}


def git_state() -> dict[str, Any] | None:
    """Return the commit of the code and what differs from it; None where gradbench is not run from a checkout."""
    if not (CONF.parent / ".git").exists():
        return None
    try:
        commit, diff = _git("rev-parse", "HEAD").strip(), _git("diff", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit, "dirty": bool(diff), "diff": diff}


def _git(*arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(CONF.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _sha256() -> str:
    digest = hashlib.sha256()
    for name, path in sorted(_files()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _files() -> Iterator[tuple[str, Path]]:
    """Yield every file under the name that it has in a checkout and in an installed package alike."""
    for room, folder, pattern in (("gradbench", PACKAGE, "*.py"), ("conf", CONF, "*.yaml")):
        for path in folder.rglob(pattern):
            yield f"{room}/{path.relative_to(folder).as_posix()}", path
