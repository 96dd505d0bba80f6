"""``python -m benchmarks``: measures this machine, and renders what was measured."""

from benchmarks.cli import app

app()
