"""What the plugin says to a vLLM it does not know, and that loading it often changes nothing."""

from __future__ import annotations

import logging

import pytest
from packaging.version import Version

pytestmark = pytest.mark.vllm


def test_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    from slidesparse.vllm_patch import compat

    monkeypatch.setattr(compat, "installed", lambda: Version("0.12.9"))
    with pytest.raises(compat.CompatibilityError, match="needs vLLM 0.13.0 or later, found 0.12.9; upgrade"):
        compat.check()


@pytest.mark.parametrize(("version", "warnings"), [("0.13.0", 1), ("0.25.1", 0), ("0.32.0", 0), ("9.0.0", 1)])
def test_outside_the_tested_range(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, warnings: int
) -> None:
    """One line a process, however often vLLM loads the plugin."""
    from slidesparse.vllm_patch import compat

    compat._warn.cache_clear()
    monkeypatch.setattr(compat, "installed", lambda: Version(version))
    monkeypatch.setattr(compat.logger, "propagate", True)
    with caplog.at_level(logging.WARNING, logger=compat.logger.name):
        compat.check()
        compat.check()
    said = [record.getMessage() for record in caplog.records if "tested with vLLM" in record.getMessage()]
    assert len(said) == warnings
    assert all(version in line for line in said)


def test_the_installed_version_is_in_the_tested_range() -> None:
    from slidesparse.vllm_patch import compat

    from slidesparse.backends import VLLM_TESTED

    found = compat.installed()
    assert found is not None
    assert Version(VLLM_TESTED[0]) <= found <= Version(VLLM_TESTED[-1])


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
