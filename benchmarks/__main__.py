"""``python -m benchmarks``: measures this machine, and renders what was measured."""

from benchmarks.cli import app
from slidesparse.cli import interrupt_by_signals

interrupt_by_signals()
app()
