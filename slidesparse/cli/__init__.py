"""The command line."""

import io
import signal
import sys

from slidesparse.errors import INTERRUPTED


def main() -> None:
    """Run the ``slidesparse`` command, which an interrupt ends with one line, even during its imports.

    SIGTERM, by which containers and batch systems stop a command, and SIGHUP, by which a closed terminal does, count as
    an interrupt: unfinished output is removed.  A signal that the caller ignores, as nohup does SIGHUP, stays ignored.
    After the imports, ``slidesparse.cli.main`` is the module of that name.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for paths that the terminal cannot show
    try:
        from slidesparse.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _interrupt(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would stop the removal
    raise KeyboardInterrupt
