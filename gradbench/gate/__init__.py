"""The validity gate: untimed updates of a strategy beside plain backprop, before a cell is trained.

A strategy that says it is exact must hand its optimizer the gradient of plain backprop and leave all else alone. A loss
that agrees does not show it: checkpointing that draws a second dropout mask has the right loss and the gradient of
another network. Nor does one update: what is never set to zero is right once.
"""

from gradbench.gate.sides import check

__all__ = ["check"]
