"""`python -m kvlease`: the command line."""

import sys

from kvlease.services.cli import main

if __name__ == "__main__":
    sys.exit(main())
