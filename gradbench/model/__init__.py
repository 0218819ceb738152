"""Models: one module each, whose `build` makes it in train mode, and the one loss of them all."""
