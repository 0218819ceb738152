"""The one place that asks SLURM's programs: a clean environment, a time limit, and errors of one line."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess

TIMEOUT_S = 20.0

_SPOILS = ("SLURM_", "SACCT_", "SCANCEL_", "SCONTROL_", "SINFO_", "SQUEUE_", "SRUN_")
"""What an enclosing allocation or a user's own taste in columns would change in an answer."""
_PREFIX = re.compile(r"^\w+: (?:error|fatal): ")
_SILENCE = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted|[Cc]onnection refused"
    r"|Transport endpoint is not connected|Unable to connect to database|SlurmDBD is down"
)


class SlurmError(Exception):
    """A program of SLURM failed; the message is one line with its own last sentence."""


class NoAnswer(SlurmError):
    """The daemon behind a program does not answer: nothing follows from it for any job."""


def environment() -> dict[str, str]:
    """Return the variables that SLURM's programs run with: of SLURM's own only SLURM_CONF, and plain output."""
    kept = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith(_SPOILS)}
    plain = {"LANG": "C", "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}  # 0: no range is cut short
    return {**kept, **plain}


def run(program: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> str:
    """Return what a program of SLURM prints.

    Raises:
        NoAnswer: its daemon does not answer, or not in time.
        SlurmError: it fails for another reason, or is not there.
    """
    code, output, errors = _finished([program, *arguments], timeout_s)
    if code == 0 and (output.strip() or ": error: " not in errors):  # some versions complain and exit with 0
        return output
    said = _last_sentence(errors) or _last_sentence(output) or f"exit code {code}"
    if _SILENCE.search(said):
        raise NoAnswer(f"{_daemon(program)} does not answer ({program}: {said})")
    raise SlurmError(f"{program}: {said}")


def _finished(words: list[str], timeout_s: float) -> tuple[int, str, str]:
    try:
        process = subprocess.Popen(
            words,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C in the terminal is not for it
        )
    except FileNotFoundError:
        raise SlurmError(f"{words[0]} is not on the PATH") from None
    except OSError as error:
        raise SlurmError(f"{words[0]} can't be started: {error.strerror}") from error
    with process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise NoAnswer(f"{_daemon(words[0])} does not answer ({words[0]}: nothing in {timeout_s:g} s)") from None
        except BaseException:
            _kill(process)
            raise
    return process.returncode, output, errors


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a program and what it has started: many a site wraps SLURM's in a script."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _daemon(program: str) -> str:
    return "slurmdbd" if program.startswith("sacct") else "slurmctld"


def _last_sentence(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _PREFIX.sub("", lines[-1]) if lines else ""
