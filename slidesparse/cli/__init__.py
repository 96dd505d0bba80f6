"""The command line."""

from slidesparse.cli.main import main

__all__ = ["main"]
