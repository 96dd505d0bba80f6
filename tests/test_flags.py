"""Environment flags and how they meet the checkpoint: nonsense and contradictions are errors that say what to do."""

from __future__ import annotations

import pytest

from slidesparse.flags import FlagError, Flags
from slidesparse.metadata import KEY, LayerEntry, Metadata, MetadataError
from slidesparse.pattern import SlidePattern

SIX_EIGHT = SlidePattern.parse("6:8")


def test_both_spellings_and_every_way_to_say_yes() -> None:
    for spelling in ("2_8", "6:8", " 2_8 "):
        for yes in ("1", "true", "YES", "on"):
            flags = Flags.from_environment({"USE_CUSPARSELT": yes, "SPARSITY": spelling})
            assert flags == Flags("sparse", SIX_EIGHT, False)
    assert Flags.from_environment({}) == Flags(None, None, False)
    assert Flags.from_environment({"USE_CUBLASLT": "1", "USE_CUSPARSELT": "0"}) == Flags("dense", None, False)
    assert Flags.from_environment({"DISABLE_SLIDESPARSE": "1"}).disabled


def test_fusion_is_asked_for_refused_or_left_open() -> None:
    for value, wanted in (("1", True), ("0", False), (" off ", False), ("", None)):
        assert Flags.from_environment({"SLIDESPARSE_FUSE": value}).fuse is wanted
    assert Flags.from_environment({}).fuse is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            {"SPARSITY": "lots"},
            ["environment variable SPARSITY", "'lots' is not a pattern", "6:8", "2_8", "2_inf"],
        ),
        ({"SPARSITY": "2:8"}, ["'2:8' prunes 6 of every 8", "did you mean 6:8 (2 of every 8 pruned)?"]),
        ({"SPARSITY": "2_7"}, ["block length 7", "even"]),
        ({"SPARSITY": "3_8"}, ["prunes 3 of every 8", "exactly 2"]),
        ({"SLIDESPARSE_FUSE": "maybe"}, ["SLIDESPARSE_FUSE='maybe'", "use 1 or 0"]),
        ({"USE_CUSPARSELT": "maybe"}, ["USE_CUSPARSELT='maybe'", "use 1 or 0"]),
        ({"USE_CUSPARSELT": "1", "USE_CUBLASLT": "1"}, ["both set", "unset one"]),
    ],
)
def test_nonsense(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(FlagError) as caught:
        Flags.from_environment(environment)
    for word in words:
        assert word in str(caught.value)


def _config(layout: str = "dense") -> dict[str, object]:
    layers = {"layers.0.mlp": LayerEntry(SIX_EIGHT, 64)}
    return {"quant_method": "compressed-tensors", KEY: Metadata(SIX_EIGHT, layout, layers).to_json()}


@pytest.mark.vllm
class TestResolve:
    """`slidesparse.vllm_patch.resolve`, which needs no engine."""

    def test_is_stamped_once_and_then_beats_the_environment(self) -> None:
        from slidesparse.vllm_patch.resolve import STAMP, resolve

        config = _config()
        first = resolve(config, Flags(), on_cuda=False)
        assert (first.pattern, first.path, first.backend, first.layout) == (
            "6:8",
            "sparse",
            "reference",
            "dense",
        )
        assert config[STAMP]
        assert resolve(config, Flags("dense", SlidePattern(6)), on_cuda=True) == first

    def test_fusion_is_stamped(self) -> None:
        from slidesparse.vllm_patch.resolve import STAMP, resolve

        for backend, default in (("hopper", True), ("cusparselt", False)):
            for asked, stamped in ((None, default), (True, True), (False, False)):
                config = _config()
                assert resolve(config, Flags(fuse=asked, backend=backend), on_cuda=True).fuse is stamped
                assert config[STAMP]["fuse"] is stamped  # type: ignore[index]
        assert resolve(_config(), Flags(), on_cuda=False).fuse is False

    @pytest.mark.parametrize(
        ("path", "on_cuda", "backend"),
        [
            (None, True, "cusparselt"),
            ("sparse", True, "cusparselt"),
            ("dense", True, "cublaslt"),
            ("sparse", False, "reference"),
            ("dense", False, "reference"),
        ],
    )
    def test_backend(self, path: str | None, on_cuda: bool, backend: str) -> None:
        from slidesparse.vllm_patch.resolve import resolve

        made = resolve(_config(), Flags(path), on_cuda)
        assert made.backend == backend
        assert made.reason

    def test_contradictions(self) -> None:
        from slidesparse.vllm_patch.resolve import ResolveError, resolve

        with pytest.raises(
            ResolveError, match=r"asks for 4:6 \(2 of every 6 pruned\).*pruned to 6:8.*SPARSITY=2_8"
        ):
            resolve(_config(), Flags("sparse", SlidePattern(6)), False)
        with pytest.raises(ResolveError, match="does not carry one, so set SPARSITY"):
            resolve({"quant_method": "compressed-tensors"}, Flags("sparse"), False)
        with pytest.raises(ResolveError, match="USE_CUBLASLT=1 runs dense weights.*slided"):
            resolve(_config("slided"), Flags("dense"), True)

    def test_metadata_from_the_future(self) -> None:
        from slidesparse.vllm_patch.resolve import resolve

        config = _config()
        config[KEY]["version"] = 2  # type: ignore[index]
        with pytest.raises(MetadataError, match="version is 2, this slidesparse reads 1; upgrade"):
            resolve(config, Flags(), False)
