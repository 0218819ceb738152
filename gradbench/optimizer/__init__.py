"""Optimizers that no dependency ships; those of torch need a YAML under `conf/optimizer/` and nothing here."""
