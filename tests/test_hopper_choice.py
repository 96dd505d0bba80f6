"""Which backend the sparse path takes: the flag, the machine."""

from __future__ import annotations

import pytest

from slidesparse import nvcc
from slidesparse.flags import FlagError, Flags


def test_the_flag() -> None:
    for value in ("hopper", " Hopper ", "cusparselt"):
        assert Flags.from_environment({"SLIDESPARSE_BACKEND": value}).backend == value.strip().lower()
    for value in ("", "auto", "AUTO"):
        assert Flags.from_environment({"SLIDESPARSE_BACKEND": value}).backend is None
    with pytest.raises(FlagError, match="SLIDESPARSE_BACKEND='cutlass': use auto, cusparselt or hopper"):
        Flags.from_environment({"SLIDESPARSE_BACKEND": "cutlass"})
    with pytest.raises(FlagError, match="USE_CUBLASLT asks for the dense path, SLIDESPARSE_BACKEND=hopper"):
        Flags.from_environment({"SLIDESPARSE_BACKEND": "hopper", "USE_CUBLASLT": "1"})


@pytest.mark.vllm
class TestChoice:
    """Of the backend that serves, by `slidesparse.vllm_patch.resolve`."""

    @pytest.mark.parametrize("wanted", ["cusparselt", "hopper"])
    def test_a_flag_decides(self, wanted: str) -> None:
        from slidesparse.vllm_patch import resolve

        found, reason = resolve._backend("sparse", True, wanted)
        assert (found, reason) == (wanted, f"CUDA device, SLIDESPARSE_BACKEND={wanted}")
        with pytest.raises(resolve.ResolveError, match=f"SLIDESPARSE_BACKEND={wanted} needs an NVIDIA GPU"):
            resolve._backend("sparse", False, wanted)

    def test_without_one_the_machine_does(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from slidesparse.vllm_patch import resolve

        for capability in (None, (8, 0), (10, 0)):
            assert resolve._preferred(capability) == ("cusparselt", "CUDA device")
        monkeypatch.setattr(nvcc, "library", lambda: None)
        assert resolve._preferred((9, 0)) == ("hopper", "CUDA device of compute capability 9.0")

        def missing() -> None:
            raise nvcc.ToolchainError("nvcc was\nnot found", "install it")

        monkeypatch.setattr(nvcc, "library", missing)
        backend, reason = resolve._preferred((9, 0))
        assert backend == "cusparselt"
        assert "hopper would be faster, but nvcc was not found; install it" in reason
