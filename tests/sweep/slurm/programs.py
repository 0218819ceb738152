"""SLURM's programs, pretended on the PATH: what they print and how they end is the test's choice."""

from __future__ import annotations

import shlex
from pathlib import Path

SACCT_OFF = "Slurm accounting storage is disabled"
NO_JOB = "slurm_load_jobs error: Invalid job id specified"
NO_CONTROLLER = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


class Programs:
    """A folder that is the whole PATH."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def say(self, name: str, text: str = "", *, error: str = "", code: int | None = None, before: str = "") -> None:
        """Let a program print `text` and `error`, after whatever shell commands are to run `before`."""
        script = [
            "#!/bin/sh",
            f"printf '%s\\n' \"$*\" >>{self._folder}/{name}.calls",
            f"/usr/bin/env >{self._folder}/{name}.env",
            before,
            f"printf %s {shlex.quote(text)}",
            f"printf %s {shlex.quote(error)} >&2",
            f"exit {code if code is not None else int(bool(error))}",
        ]
        path = self._folder / name
        path.write_text("\n".join(script))
        path.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        """Return the arguments of each call."""
        path = self._folder / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []

    def environment(self, name: str) -> dict[str, str]:
        """Return the variables of the last call."""
        lines = (self._folder / f"{name}.env").read_text().splitlines()
        return dict(line.partition("=")[::2] for line in lines)


def account(job: str, state: str, status: str = "0:0", node: str = "n1", times: str = "100|160|60") -> str:
    """Return a line of sacct."""
    return f"{job}|{state}|{status}|{node}|{times}\n"


def queued(job: str, state: str, reason: str = "None", *, node: str = "", status: int = 0) -> str:
    """Return a line of squeue."""
    return f"{job}|{state}|{status}|{node}|100|4000|1:00|{reason}|\n"
