"""The command line."""

import io
import sys

from slidesparse.errors import INTERRUPTED


def main() -> None:
    """Run the ``slidesparse`` command, which an interrupt ends with one line, even during its imports.

    After the imports, ``slidesparse.cli.main`` is the module of that name.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for paths that the terminal cannot show
    try:
        from slidesparse.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
