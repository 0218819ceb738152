"""What a process that was just forked does to be a cell, from its first breath to its exit."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from gradbench.sweep.local.rank import OF_OTHERS, VARIABLES, Identity
from gradbench.tracking import disk

Target = Callable[[Path], Any]
"""What runs an attempt folder, in a process of its own."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_OOM_SCORE = 500  # the kernel shall prefer a cell to the zygote


class _Closable(Protocol):
    def close(self) -> None: ...


def be_cell(target: Target, identity: Identity, zygote: int, inherited: Sequence[_Closable]) -> NoReturn:
    """Run one attempt in this newborn process, and exit whatever threads and exit handlers are left."""
    code, attempt = 1, Path(identity.request.attempt)
    try:
        _become_own_process(identity, inherited)
        _die_with(zygote)
        if identity.rank == 0:
            disk.save_state(attempt)
        target(attempt)
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _become_own_process(identity: Identity, inherited: Sequence[_Closable]) -> None:
    request = identity.request
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not request.saves:  # else it stays deaf until it can save itself
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for end in inherited:
        end.close()
    _write_to(identity.log)
    print(f"{request.name}  {request.attempt}  process {os.getpid()}")
    faulthandler.enable()
    for name in (*VARIABLES, *OF_OTHERS):
        os.environ.pop(name, None)
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(request.threads)) | dict(request.env) | identity.variables())
    if request.saves:
        os.environ["GRADBENCH_ON_STOP"] = "save"
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(request.threads)
    gc.enable()


def _write_to(log: Path) -> None:
    """Let all that this process and its children print go to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _die_with(parent: int) -> None:
    """Tie this process's life to its parent's, be killed for memory before it, and inherit orphans (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    inherit_orphans()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    if os.getppid() != parent:
        os._exit(1)


def inherit_orphans() -> None:
    """Become the parent of the descendants whose parents die, so that they can be found (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1
