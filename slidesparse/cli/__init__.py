"""The command line."""

import signal
import sys

from slidesparse.errors import INTERRUPTED


def main() -> None:
    """Run the ``slidesparse`` command, which an interrupt ends with one line, even during its imports.

    After the imports, ``slidesparse.cli.main`` is the module of that name.
    """
    interrupt_by_signals()
    try:
        from slidesparse.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def interrupt_by_signals() -> None:
    """Make SIGTERM and SIGHUP interrupts, so that unfinished output is removed and engines are ended.

    Containers and batch systems stop a command by SIGTERM, and a closed terminal does by SIGHUP.  A signal that the
    caller ignores, as nohup does SIGHUP, stays ignored.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would stop the cleaning up
    raise KeyboardInterrupt
