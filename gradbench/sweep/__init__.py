"""Sweeps: cells and their ids, launching, how an attempt ended, status, rerun."""
