"""The command line."""

import sys

from slidesparse.errors import INTERRUPTED


def main() -> None:
    """The ``slidesparse`` command, which an interrupt ends in one line even while it is imported.

    Once it is, ``slidesparse.cli.main`` is the module of that name.
    """
    try:
        from slidesparse.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
