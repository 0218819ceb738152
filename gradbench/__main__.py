"""`python -m gradbench` and the console script."""

import sys

from gradbench.cli import main

if __name__ == "__main__":
    sys.exit(main())
