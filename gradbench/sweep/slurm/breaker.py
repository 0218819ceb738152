"""When everything fails: notice it before a sweep has burned through its jobs, or a broken node through the sweep."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from gradbench.record import Outcome, Result

FIRST = 5
"""So many cells at the start of a sweep that die of one error stand for the rest."""
QUICK_S, QUICK_DEATHS = 60.0, 5
"""A node where so many cells in a row die so soon is taken for broken, if others work and don't know their errors."""

_DEATHS = frozenset({Outcome.FAILED, Outcome.LOST, Outcome.NODE_FAIL, Outcome.HOST_OOM})
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+|/\S+")
"""What differs between two reports of one error: addresses, numbers, paths."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Nothing has worked so far: the cells that wait should go on waiting."""

    reason: str
    node: str | None  # where they all died, if that is one node


@dataclass(frozen=True, slots=True)
class Exclude:
    """Cells that wait should not run on this node."""

    node: str


class Breaker:
    """Judges a sweep by its ends, in their order."""

    def __init__(self) -> None:
        """Know nothing."""
        self._first: list[tuple[str, str]] | None = []  # kind and node of each; None: some cell has ended well
        self._quick: defaultdict[str, list[str]] = defaultdict(list)  # kinds, by node
        self._nodes: defaultdict[str, set[str]] = defaultdict(set)  # by kind
        self._well: set[str] = set()
        self._excluded: set[str] = set()

    def note(self, result: Result, node: str) -> Hold | Exclude | None:
        """Take note of an end on a node (empty: unknown), and return what should be done about the cells that wait."""
        if result.outcome.final:
            self._first = None
            self._quick[node] = []
            self._well.add(node)
        if result.outcome not in _DEATHS:
            return None
        return self._hold(result, node) or self._exclude(result, node)

    def _hold(self, result: Result, node: str) -> Hold | None:
        if self._first is None:
            return None
        self._first.append((kind_of(result.outcome, result.reason), node))
        if len(self._first) != FIRST or len({kind for kind, _ in self._first}) > 1:
            return None
        nodes = {where for _, where in self._first}
        return Hold(str(result.reason), node or None if len(nodes) == 1 else None)

    def _exclude(self, result: Result, node: str) -> Exclude | None:
        kind = kind_of(result.outcome, result.reason)
        self._nodes[kind].add(node)
        if result.ended_unix_s - (result.started_unix_s or result.ended_unix_s) < QUICK_S and not _is_verdict(result):
            self._quick[node].append(kind)
        elsewhere = any(self._nodes[kind] - {node} for kind in self._quick[node])
        if len(self._quick[node]) < QUICK_DEATHS or elsewhere or not node or node in self._excluded:
            return None
        if not self._well - {node}:  # perhaps there is no other
            return None
        self._excluded.add(node)
        return Exclude(node)


def _is_verdict(result: Result) -> bool:
    """Tell whether a cell died of its own strategy, which no node can help."""
    gate = result.facts.get("gate")
    return isinstance(gate, Mapping) and not gate["passed"]


def kind_of(outcome: Outcome | None, reason: str | None) -> str:
    """Return what two deaths of one cause have in common."""
    return f"{outcome}: {_VARYING.sub('#', reason or '')}"
