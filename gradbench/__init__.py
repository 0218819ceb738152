"""gradbench: which optimizer and which memory strategy should train this model on these GPUs?"""

__version__ = "0.1.0"
