"""What an answer costs that needs no training: --help, and a mistake in the config."""

from __future__ import annotations

from functools import partial

from tests.benchmarks.figure import Figure, Spent, interleave, python

LIMIT_CPU_S = 1.0
HEAVY = ("torch", "transformers", "accelerate", "mlflow")
EXIT_CODES = {"--help": 0, "optimizer=adan": 2}


def run(quick: bool) -> list[Figure]:
    """Ask each question several times; once more to see what is imported."""
    taken = interleave({word: partial(_ask, word) for word in EXIT_CODES}, 3 if quick else 15)
    return [
        Figure("door", word, "CPU s", tuple(spent.cpu_s for spent in answers), (), LIMIT_CPU_S, _imports(word))
        for word, answers in taken.items()
    ]


def _ask(word: str, *options: str) -> Spent:
    return python(*options, "-m", "gradbench", word, code=EXIT_CODES[word])


def _imports(word: str) -> str:
    """Return which heavy packages a question imports, as `python -X importtime` tells."""
    imported = {line.rpartition("|")[2].strip() for line in _ask(word, "-X", "importtime").stderr.splitlines()}
    if "gradbench.cli" not in imported:
        raise RuntimeError("python -X importtime did not list gradbench.cli")
    return f"imports {', '.join(sorted(imported.intersection(HEAVY))) or 'no torch, no mlflow'}"
