"""The planned peak of every cell of the paper's size, as a table between two marks of the README: `make plan-table`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from gradbench.config import register
from gradbench.record import CellSpec
from gradbench.sweep.compose import Composer
from gradbench.sweep.gpus import GIB, capacity_bytes, fits
from gradbench.sweep.grid import expand
from gradbench.sweep.predict import Prediction, predict

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- plan-table: written by `make plan-table` -->", "<!-- end of plan-table -->"
LADDER = ("t4", "rtx4090", "v100-32gb", "a100-40gb", "a100-80gb", "h200")
WORDS = ("model=vit,modernbert,nanovlm,llama", "optimizer=glob(*)", "strategy=standard,checkpointing,accumulation")


def main() -> None:
    """Plan the 60 cells, and put the table into the README."""
    register()
    cells = expand(Composer(), ["size=paper", *WORDS], multirun=True).cells
    written = table(cells, predict(cells, Console(stderr=True)))
    README.write_text(replaced(README.read_text(), written))


def table(cells: Sequence[CellSpec], predictions: Mapping[str, Prediction]) -> str:
    """Return a row for each model and optimizer, a column for each strategy."""
    strategies = list(dict.fromkeys(cell.axes["strategy"] for cell in cells))
    rows: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        rows.setdefault((cell.axes["model"], cell.axes["optimizer"]), []).append(_peak(predictions[cell.id]))
    lines = [("model", "optimizer", *strategies), ("---",) * (2 + len(strategies))]
    lines += [(*name, *peaks) for name, peaks in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _peak(prediction: Prediction) -> str:
    """Return the peak in GiB, and the smallest GPU of the ladder that it fits."""
    if prediction.plan is None:
        return str(prediction.why)
    peak = prediction.plan.memory.peak_bytes
    gpu = next((gpu for gpu in LADDER if fits(peak, capacity_bytes(gpu) or 0)), "none of these")
    return f"{peak / GIB:.1f} ({gpu})"


def replaced(text: str, written: str) -> str:
    """Return the text with what stands between the two marks replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{README.name}: has no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{written}\n{END}{after}"


if __name__ == "__main__":
    main()
