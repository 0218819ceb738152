"""Run benchmarks, print their table, and write their figures as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gradbench.code import git_state
from gradbench.sweep.folder import versions
from tests.benchmarks.figure import Figure

NAMES = ("door", "expand", "step", "overhead", "sampler", "sampled", "submit", "status", "cluster")
COLUMNS = ("benchmark", "what", "n", "median", "spread", "ratio", "ratio spread", "target", "")
VERDICTS = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}


def main(argv: Sequence[str] | None = None) -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; none for all")
    parser.add_argument(
        "--quick", action="store_true", help="few repetitions of small cases, to try the benchmarks out"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all values here")
    options = parser.parse_args(argv)
    if unknown := set(options.names).difference(NAMES):
        parser.error(f"{', '.join(sorted(unknown))}: no such benchmark; there are {', '.join(NAMES)}")
    before, figures = machine(), list[Figure]()
    for name in options.names or NAMES:
        figures += importlib.import_module(f"tests.benchmarks.{name}").run(options.quick)
    if options.quick:  # small cases are all fixed cost: nothing to hold a target against
        figures = [dataclasses.replace(figure, limit=None) for figure in figures]
    load = os.getloadavg()[0]
    Console(highlight=False, width=None if os.isatty(1) else 180).print(table(figures, before, load))
    if options.json:
        options.json.write_text(json.dumps(document(figures, before, load, options.quick), indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    git = git_state()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "load_before": os.getloadavg()[0],
        "commit": git and git["commit"],
        "dirty": git and git["dirty"],
        "versions": versions(),
        "unix_s": time.time(),
    }


def document(figures: Sequence[Figure], before: dict[str, Any], load: float, quick: bool) -> dict[str, Any]:
    """Return everything that was measured."""
    rows = [dataclasses.asdict(figure) | {"met": figure.met} for figure in figures]
    return {"quick": quick, "machine": before | {"load_after": load}, "figures": rows}


def table(figures: Sequence[Figure], before: dict[str, Any], load: float) -> Table:
    """Return one row a figure."""
    title = f"{before['cores']} cores, load {before['load_before']:.1f} before and {load:.1f} after"
    made = Table(title=title, title_justify="left", header_style="bold")
    for column in (*COLUMNS, "note"):
        made.add_column(column, justify="left" if column in ("benchmark", "what", "", "note") else "right")
    for figure in figures:
        made.add_row(*row(figure))
    return made


def row(figure: Figure) -> tuple[str, ...]:
    """Return a figure as text: medians, and the smallest and largest value as their spread."""
    target = "" if figure.limit is None else f"{figure.limit:g}{'x' if figure.ratios else f' {figure.unit}'}"
    return (
        figure.benchmark,
        figure.what,
        str(len(figure.values)),
        f"{statistics.median(figure.values):.3g} {figure.unit}",
        spread(figure.values),
        f"{statistics.median(figure.ratios):.3f}" if figure.ratios else "",
        spread(figure.ratios),
        target and f"<= {target}",
        VERDICTS[figure.met],
        figure.note,
    )


def spread(values: Sequence[float]) -> str:
    """Return the smallest and the largest value."""
    return f"{min(values):.3g} - {max(values):.3g}" if len(values) > 1 else ""


if __name__ == "__main__":
    main()
