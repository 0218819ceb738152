"""Whether the cells of a table may be compared.

A loss after other samples, tokens or updates, of other data or from other weights is another experiment (B2), and so is
a time on another device or of more processes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradbench.record import Outcome
from gradbench.sweep.status import CellStatus

SAME = ("model", "size", "data", "precision", "seed")
"""Cells that agree in these axes are compared with each other by their losses."""
METHODS = ("optimizer", "strategy")
"""The axes that change neither the data nor the first weights."""
_BEGINNINGS = {"data_sha256": "data", "initial_weights_sha256": "initial weights", "first_batch_sha256": "first batch"}
_OF_NUMBERS = ("python", "torch", "transformers", "accelerate", "numpy")
"""The libraries that a result may depend on, of those whose versions it has."""

Answers = Mapping[str, str]
"""What cells must agree in, in words, by aspect; what is not known of a cell is absent, and agrees with everything."""


@dataclass(frozen=True)
class _Question:
    """Something that cells must agree in."""

    what: str  # that can't be compared where they do not
    verb: str  # goes before the answers
    among: Callable[[CellStatus], Sequence[Any]]  # which cells are asked together
    answers: Callable[[CellStatus], Answers]


def notes(cells: Sequence[CellStatus]) -> list[str]:
    """Return a line for each group of cells that are not comparable: by their losses, by their times and memory."""
    known = [cell for cell in cells if cell.outcome is not None and cell.outcome.final and cell.facts]
    return [line for question in _QUESTIONS for line in _told(question, known)]


def _told(question: _Question, cells: Sequence[CellStatus]) -> list[str]:
    groups: defaultdict[tuple[str, ...], list[CellStatus]] = defaultdict(list)
    for cell in cells:
        groups[tuple(map(str, question.among(cell)))].append(cell)
    return [line for group in groups.values() if (line := _line(question, group)) is not None]


def _line(question: _Question, group: Sequence[CellStatus]) -> str | None:
    """Return the line about cells that are asked together, with the aspects in which they differ; None: they agree."""
    answers = [question.answers(cell) for cell in group]
    aspects = dict.fromkeys(aspect for each in answers for aspect in each)
    differ = [aspect for aspect in aspects if len({each[aspect] for each in answers if aspect in each}) > 1]
    if not differ:
        return None
    told = Counter(", ".join(each[aspect] for aspect in differ if aspect in each) for each in answers)
    del told[""]
    parts = "; ".join(f"{words} ({number})" for words, number in sorted(told.items()))
    whose = f" of {group[0].axes.get('model')}, seed {group[0].axes.get('seed')}," if question.among(group[0]) else ""
    return f"not comparable by {question.what}: the cells{whose} {question.verb} {parts}"


def _by_loss(cell: CellStatus) -> Sequence[Any]:
    return [cell.axes.get(axis) for axis in SAME]


def _by_beginning(cell: CellStatus) -> Sequence[Any]:
    return sorted((key, str(value)) for key, value in cell.axes.items() if key.partition(".")[0] not in METHODS)


def _together(_cell: CellStatus) -> Sequence[Any]:
    return ()


def _seen(cell: CellStatus) -> Answers:
    """Return what a training has seen; how many tokens, only of one that came to its end."""
    facts, found = cell.facts, {}
    if "samples_planned" in facts and cell.updates is not None:
        found["budget"] = f"{facts['samples_planned']} samples in {cell.updates} updates"
    if "tokens_seen" in facts and cell.outcome is Outcome.OK:
        found["tokens"] = f"{facts['tokens_seen']} tokens"
    return found | {key: f"{key}={value}" for key, value in cell.axes.items() if key.startswith("data.")}


def _began_with(cell: CellStatus) -> Answers:
    return {key: f"{words} {cell.facts[key][:7]}" for key, words in _BEGINNINGS.items() if key in cell.facts}


def _ran_on(cell: CellStatus) -> Answers:
    facts, found = cell.facts, {}
    if "device" in facts:
        found["device"] = str(facts["device"])
    if "processes" in facts:
        found["processes"] = f"{facts['processes']} process{'es' * (facts['processes'] > 1)}"
    return found


def _libraries(cell: CellStatus) -> Answers:
    """Return the versions, both of a library that was another when a stopped training went on."""
    first = cell.facts.get("versions", {})
    last = first | cell.facts.get("resumed_with", {}).get("versions", {})
    pairs = {name: dict.fromkeys((first[name], last[name])) for name in _OF_NUMBERS if name in first}
    return {name: f"{name} {', then '.join(versions)}" for name, versions in pairs.items()}


_QUESTIONS = (
    _Question("loss", "see", _by_loss, _seen),
    _Question("loss", "began with", _by_beginning, _began_with),
    _Question("time and memory", "ran on", _together, _ran_on),
    _Question("loss, time and memory", "ran with", _together, _libraries),
)
