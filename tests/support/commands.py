"""Commands of ``slidesparse``, run in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from slidesparse.cli.main import app


class Done:
    """The outcome of a command."""

    def __init__(self, *arguments: object) -> None:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr
