"""`kvlease` and `python -m kvlease`: the command line, interruptible from its first moment."""

import sys


def main() -> int:
    """Load the command line and run it; an interrupt while it loads is one like any other."""
    try:
        from kvlease.services import cli
    except KeyboardInterrupt:
        print("kvlease: interrupted before anything was begun", file=sys.stderr)
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
