"""The door: Hydra's words and the sub-commands. Nothing here imports torch, so that mistakes are answered at once."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from gradbench.config import CONF, UserError, check, register
from gradbench.record import CellSpec
from gradbench.tracking.disk import Damaged

NO_READER, MISTAKE, INTERRUPTED = 1, 2, 130
WIDE = 200  # columns
HYDRA_FLAGS = ("--cfg", "-c", "--info", "-i", "--hydra-help", "--shell-completion", "-sc")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 (a cell has no result), 2 (a mistake), 130 (Ctrl-C)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except (UserError, Damaged) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"gradbench: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`| head`); python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER


def _dispatch(words: list[str]) -> int:
    if any(word in HYDRA_FLAGS or word.startswith("--cfg=") for word in words):
        return _hydra(words)
    if words and words[0] in COMMANDS:
        return COMMANDS[words[0]](words[1:])
    if words and words[0] in ("-h", "--help"):
        return _help()
    if words == ["--version"]:
        print(f"gradbench {version('gradbench')}")
        return 0
    return _run(words)


@dataclass(frozen=True)
class _Words:
    """A command's words, sorted."""

    overrides: list[str]
    hydra: list[str]
    names: list[str]
    options: argparse.Namespace


def _sort(words: Sequence[str], parser: argparse.ArgumentParser) -> _Words:
    """Tell overrides (`key=value`, `+key=value`, `~key`) and Hydra's own from names and options."""
    parser.add_argument("-cd", "--config-dir", action="append", default=[], help="a further folder of YAML files")
    parser.add_argument("words", nargs="*")
    options = parser.parse_intermixed_args(list(words))
    overrides = [word for word in options.words if "=" in word or word.startswith("~")]
    names = [word for word in options.words if word not in overrides]
    ours = [word for word in overrides if not _is_hydra(word)]
    return _Words(ours, [word for word in overrides if _is_hydra(word)], names, options)


def _is_hydra(word: str) -> bool:
    return word.lstrip("+~").startswith(("hydra.", "hydra/"))


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose mistakes are ours."""

    def error(self, message: str) -> Any:
        raise UserError(message)


def _parser(name: str) -> _Parser:
    return _Parser(prog=f"gradbench {name}".strip(), description=DESCRIPTIONS.get(name), allow_abbrev=False)


def _no_names(words: _Words) -> None:
    if words.names and words.names[0] in COMMANDS:
        raise UserError(f"{words.names[0]}: a command comes first: gradbench {words.names[0]} ...")
    if words.names:
        near = difflib.get_close_matches(words.names[0], COMMANDS, n=1)
        guess = f"; did you mean {near[0]}?" if near else ""
        commands = ", ".join(COMMANDS)
        raise UserError(f"{words.names[0]}: neither an override (key=value) nor a command ({commands}){guess}")


def _grid(words: _Words) -> tuple[tuple[CellSpec, ...], tuple[str, ...], Any]:
    """Return the cells that the words describe, what to tell about them, and Hydra's own node."""
    from gradbench.sweep.compose import Composer  # Hydra's loader: half of the start-up time of --help
    from gradbench.sweep.grid import expand

    composer = Composer(words.options.config_dir)
    hydra = composer.hydra(words.hydra, lambda: _auto(words.options.multirun))
    grid = expand(composer, words.overrides, multirun=words.options.multirun)
    return grid.cells, grid.notes, hydra


def _auto(multirun: bool) -> str:
    """Return where cells run if the user does not say: a grid on the cluster that there is, one cell here."""
    from gradbench.sweep.slurm.site import is_here

    return "slurm" if multirun and is_here() else "local"


def _settings(words: _Words) -> dict[str, Any]:
    """Return the resolved config of a command that is not about one cell: where the runs are, the tracking store."""
    from gradbench.sweep.compose import Composer, DoesNotApply
    from gradbench.sweep.grid import no_such_key

    composer = Composer(words.options.config_dir)
    try:
        settings = composer.cell(words.overrides)[0]
    except DoesNotApply as error:
        raise UserError(error.why or no_such_key(error.line, error.key, [composer.cell([])[0]])) from error
    check(settings)
    return settings


def _console(*, stderr: bool = False) -> Console:
    """Return where people read: as wide as their terminal, and wide enough for any name where it is none."""
    console = Console(highlight=False, stderr=stderr)
    return console if console.is_terminal else Console(highlight=False, stderr=stderr, width=WIDE)


def _warn(line: str) -> None:
    print(line, file=sys.stderr)


def _multirun(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("-m", "--multirun", action="store_true", help="several values: a grid of cells")
    return parser


def _run(argv: Sequence[str]) -> int:
    words = _sort(argv, _multirun(_parser("")))
    _no_names(words)
    cells, notes, hydra = _grid(words)
    from gradbench.sweep.run import run  # imports the launchers

    command = ("python", "-m", "gradbench", *argv)
    return run(cells, notes, hydra, command, _console())


def _plan(argv: Sequence[str]) -> int:
    parser = _multirun(_parser("plan"))
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    words = _sort(argv, parser)
    _no_names(words)
    cells, notes, hydra = _grid(words)
    from gradbench.sweep import plan  # imports torch
    from gradbench.sweep.gpus import capacity_bytes
    from gradbench.sweep.predict import predict
    from gradbench.sweep.run import about, already, job_of, launcher_of
    from gradbench.sweep.vet import vet

    runs, asked = Path(cells[0].config["runs"]), cells[0].config["plan"]
    done, busy = already(cells)
    vetted, remarks = vet(cells)
    todo = [cell for cell in vetted if cell.skip is None and cell.id not in {*done, *busy}]
    jobs = [job_of(runs, cell) for cell in todo]
    remarks += about(done, busy)
    remarks += launcher_of(cells[0].config, hydra).preview(jobs) if jobs else []
    capacity = capacity_bytes(asked["gpu"])
    predictions = predict(vetted, _console(stderr=True), capacity) if asked["predict"] or capacity else {}
    remarks += plan.unpredicted(vetted, predictions)
    if words.options.json:
        print(plan.as_json(vetted, done, predictions))
        for note in (*notes, *remarks):
            print(note, file=sys.stderr)
    else:
        plan.show(_console(), vetted, done, (*notes, *remarks), predictions, busy)
    return 0


def _status(argv: Sequence[str]) -> int:
    parser = _parser("status")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--watch", action="store_true", help="refresh until every cell has ended")
    words = _sort(argv, parser)
    if len(words.names) > 1:
        raise UserError(f"{' '.join(words.names)}: status shows one sweep; name one, or none for the newest")
    from gradbench.sweep import comparable, folder, status, watch

    runs = Path(_settings(words)["runs"])
    sweep = folder.find(runs, words.names[0]) if words.names else folder.newest(runs, _warn)
    if words.options.json:
        cells = status.of_sweep(sweep)
        print(status.as_json(sweep.name, cells))
        for note in comparable.notes(cells):
            print(note, file=sys.stderr)
    else:
        watch.show(sweep, _console(), live=words.options.watch)
    if status.tracking_is_behind(sweep):  # nobody else will send what has ended
        from gradbench.tracking.uploader import sync  # imports mlflow

        with contextlib.redirect_stdout(sys.stderr):
            sync([sweep])
    return 0


def _rerun(argv: Sequence[str]) -> int:
    parser = _parser("rerun")
    parser.add_argument("--failed", action="store_true", help="every cell of the sweep that has no result")
    parser.add_argument("--sweep", help="the sweep (default: the newest)")
    parser.add_argument("--json", action="store_true", help="what became of the cells as one JSON document on stdout")
    words = _sort(argv, parser)
    from gradbench.sweep import folder, status
    from gradbench.sweep.compose import Composer
    from gradbench.sweep.rerun import rerun  # imports the launchers

    settings, options = _settings(words), words.options
    sweep = folder.find(Path(settings["runs"]), options.sweep)
    content = folder.load(sweep)
    # As the sweep was started, unless this command says otherwise.
    hydra_words = [word for word in content["command"] if _is_hydra(word)] + words.hydra
    hydra = Composer(options.config_dir).hydra(hydra_words, lambda: str(content["launcher"]))
    console = _console(stderr=options.json)
    statuses, code = rerun(
        settings, words.overrides, words.names, sweep, failed=options.failed, hydra=hydra, console=console
    )
    if options.json:
        print(status.as_json(sweep.name, statuses))
    return code


def _cancel(argv: Sequence[str]) -> int:
    words = _sort(argv, _parser("cancel"))
    if len(words.names) != 1:
        raise UserError("cancel: name the sweep to stop (gradbench status shows the newest)")
    from gradbench.sweep import folder
    from gradbench.sweep.cancel import cancel

    print(cancel(folder.find(Path(_settings(words)["runs"]), words.names[0])))
    return 0


def _sync(argv: Sequence[str]) -> int:
    words = _sort(argv, _parser("sync"))
    _no_names(words)
    from gradbench.sweep import folder, status
    from gradbench.tracking.uploader import sync  # imports mlflow

    sweeps = folder.all_sweeps(Path(_settings(words)["runs"]))
    healthy = []
    for sweep in sweeps:
        try:
            status.of_sweep(sweep)  # an attempt that nobody saw die gets its outcome first
        except Damaged as error:
            _warn(f"gradbench: {error}")
        else:
            healthy.append(sweep)
    return 0 if sync(healthy) and healthy == sweeps else 1


def _ui(argv: Sequence[str]) -> int:
    parser = _parser("ui")
    parser.add_argument("--port", type=int, default=5000)
    words = _sort(argv, parser)
    _no_names(words)
    from gradbench.tracking.ui import ui

    settings = _settings(words)
    try:
        return ui(Path(settings["runs"]), settings["tracking"]["uri"], words.options.port)
    except ValueError as error:
        raise UserError(str(error)) from error


def _hydra(words: list[str]) -> int:
    """Let Hydra answer what is Hydra's: --cfg, --info, shell completion."""
    import hydra  # its decorator reads sys.argv

    from gradbench.sweep.compose import VERSION_BASE, Composer

    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    if not {"-m", "--multirun", "-cd", "--config-dir"} & set(words):
        composer = Composer()
        composer.check_choices([word for word in overrides if not _is_hydra(word)])  # Hydra says it in many lines
    register()
    sys.argv = [sys.argv[0], *words]
    hydra.main(config_path=str(CONF), config_name="config", version_base=VERSION_BASE)(lambda _cfg: None)()
    return 0


def _help() -> int:
    from gradbench.sweep.compose import Composer

    composer = Composer()
    print(HELP)
    for group in ("model", "optimizer", "strategy", "size"):
        print(f"  {group:<12}{' '.join(composer.choices(group))}")
    print("\nThe whole config of a cell: python -m gradbench --cfg job. A command's options: gradbench status --help")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "plan": _plan,
    "status": _status,
    "rerun": _rerun,
    "cancel": _cancel,
    "sync": _sync,
    "ui": _ui,
}

DESCRIPTIONS = {
    "plan": "Compose and list the cells of a command; submit nothing.",
    "status": "Show every cell of a sweep (default: the newest) with its outcome or live state.",
    "rerun": "Run the next attempt of the named cells, or of all without a result.",
    "cancel": "Stop a sweep: its jobs that wait or run, or the driver of its local workers.",
    "sync": "Send to the tracking server whatever it has not confirmed.",
    "ui": "Start the MLflow UI on the store in use and print its address.",
}

HELP = """\
gradbench: which optimizer and which memory strategy should train this model on these GPUs?

  python -m gradbench [key=value ...]                              one cell, here
  python -m gradbench -m 'optimizer=glob(*)' 'strategy=glob(*)'    the grid
  python -m gradbench plan [-m] [key=value ...]                    what would run; submits nothing
  python -m gradbench status [SWEEP] [--watch] [--json]            every cell's outcome or live state
  python -m gradbench rerun CELL... | --failed [--sweep SWEEP]     the next attempt of just these
  python -m gradbench cancel SWEEP                                 stop it, jobs that wait included
  python -m gradbench sync                                         send what MLflow has not confirmed
  python -m gradbench ui [--port N]                                browse the results in MLflow

Keys: seed, size, precision (fp32, bf16), train.updates, train.batch_size, train.eval_every, optimizer.lr,
strategy.*, model.*, data.*, gate.*, probe.*, plan.predict, plan.gpu, tracking.uri, tracking.experiment, launch.workers,
launch.threads, launch.skip_oom, resources.gpus/cpus/mem_gb/time_min/processes/nodes, runs (the folder of results),
rerun=all (finished cells too).
On SLURM: launch.wait/cells_per_job/throttle/resume_on_timeout/on_failure, hydra.launcher.partition/account/qos/...;
hydra/launcher=local or =slurm forces one. Choices, also as optimizer=sgd,adam or optimizer='glob(ada*)' with -m:
"""
