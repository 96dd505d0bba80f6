"""``python -m benchmarks report``: turn the results in a folder into Markdown tables and SVG plots.

Everything in the report comes from the files of the folder (and of a reference, where one is given): what was not
measured is shown as ``-`` and listed as missing, never interpolated.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.records import RecordsError
from slidesparse.errors import EnvironmentFault

try:
    from benchmarks.report import plots, spmm
    from benchmarks.report.pages import Results
except ImportError as error:
    if error.name not in ("pandas", "matplotlib"):
        raise
    raise EnvironmentFault(
        f"reports need pandas and matplotlib ({error}): pip install '.[report]' in a clone of SlideSparse"
    ) from error

__all__ = ["render"]


def render(folder: Path, reference: Path | None = None) -> list[Path]:
    """Write the report of ``folder`` into it: README.md, a page for each benchmark that is there, and plots.

    Everything is read before anything is written, and the output is deterministic.  Returns the paths written.  Raises
    RecordsError for a folder that does not exist or holds no measurement, and for an invalid file.
    """
    if not folder.is_dir():
        raise RecordsError(f"{folder} is not a folder; name one that benchmarks wrote to")
    results = Results(folder)
    drawn = [path for name, plot in results.drawn().items() for path in plots.draw(name, folder, *plot)]
    drawn += spmm.draw(results.tables["spmm"], folder)
    texts = results.pages(reference)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [*(folder / name for name in texts), *drawn]
