"""The command line."""

import io
import signal
import sys

from slidesparse.errors import INTERRUPTED


def main() -> None:
    """Run the ``slidesparse`` command, which an interrupt ends with one line, even during its imports.

    SIGTERM, by which containers and batch systems stop a command, counts as an interrupt: unfinished output is removed.
    After the imports, ``slidesparse.cli.main`` is the module of that name.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for paths that the terminal cannot show
    try:
        from slidesparse.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
