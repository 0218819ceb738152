"""What gradbench costs, as ratios within one run: `python -m tests.benchmarks [NAME ...] [--quick] [--json PATH]`.

A benchmark is a module with `run(quick) -> list[Figure]`. Variants are interleaved, so that whatever else the machine
does meets all of them alike; nothing here is a test, because a timed test fails on a busy machine.
"""
