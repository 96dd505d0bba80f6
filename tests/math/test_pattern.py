"""Patterns: both spellings, the paper's numbers, the geometry of windows, and refusals."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slidesparse.pattern import EXAMPLES, MixedPattern, PatternError, SlideLayout, SlidePattern, parse_pattern

# name, flag, density, gamma, N/(N-1)
FIGURES = [
    ("2:4", "2_4", Fraction(1, 2), Fraction(1), Fraction(2)),
    ("4:6", "2_6", Fraction(2, 3), Fraction(4, 3), Fraction(3, 2)),
    ("6:8", "2_8", Fraction(3, 4), Fraction(3, 2), Fraction(4, 3)),
    ("8:10", "2_10", Fraction(4, 5), Fraction(8, 5), Fraction(5, 4)),
    ("10:12", "2_12", Fraction(5, 6), Fraction(5, 3), Fraction(6, 5)),
    ("12:14", "2_14", Fraction(6, 7), Fraction(12, 7), Fraction(7, 6)),
    ("14:16", "2_16", Fraction(7, 8), Fraction(7, 4), Fraction(8, 7)),
    ("2_inf", "2_inf", Fraction(1), Fraction(2), Fraction(1)),
]


@pytest.mark.parametrize(("ratio", "flag", "density", "expansion", "speedup"), FIGURES)
def test_parse_accepts_both_spellings_with_figures_of_the_paper(
    ratio: str, flag: str, density: Fraction, expansion: Fraction, speedup: Fraction
) -> None:
    pattern = SlidePattern.parse(ratio)
    assert pattern == SlidePattern.parse(flag) == SlidePattern.parse(f"  {flag.upper()}\n")
    assert (pattern.ratio, pattern.flag) == (ratio, flag)
    assert (pattern.density, pattern.expansion, 1 / pattern.density) == (density, expansion, speedup)


def test_str_gives_the_ratio_and_what_it_prunes() -> None:
    assert str(SlidePattern.parse("2_8")) == "6:8 (2 of every 8 pruned)"
    assert str(SlidePattern.parse("2_inf")) == "2_inf (nothing pruned)"
    assert SlidePattern.parse("2_\N{INFINITY}") == SlidePattern(None)


@pytest.mark.parametrize(
    ("text", "found", "meant"),
    [
        *((text, repr(text), meant) for text, meant in (("2:8", "6:8"), ("6_8", "6:8"), ("2:16", "14:16"))),
        *((text, repr(text), None) for text in ("1:4", "3:4", "4:8", "1_8", "8:6", "", "dense", "6-8")),
        *((text, repr(text), None) for text in ("6:8:10", "-2:8", "6.0:8", "2_infinity", "inf")),
        *((f"2_{length}", f"block length {length} is", None) for length in (0, 2, 7, 4098)),
        *((f"{length - 2}:{length}", f"block length {length} is", None) for length in (2, 7)),
        *((text, "", None) for text in ("6" * 5000 + ":8", "6:" + "8" * 5000, "9999999998:10000000000")),
    ],
)
def test_parse_refuses_invalid_patterns_with_suggestion(text: str, found: str, meant: str | None) -> None:
    with pytest.raises(PatternError) as error:
        SlidePattern.parse(text)
    message = str(error.value)
    assert found in message
    assert EXAMPLES in message
    assert len(message) < 400
    assert f"did you mean {meant}" in message if meant else "did you mean" not in message


@given(st.text(max_size=12))
def test_parse_of_any_text_raises_only_pattern_error(text: str) -> None:
    try:
        pattern = SlidePattern.parse(text)
    except PatternError:
        return
    assert SlidePattern.parse(pattern.ratio) == SlidePattern.parse(pattern.flag) == pattern


@given(st.integers(2, 2048), st.integers(0, 9000), st.data())
def test_layout_sizes(n: int, columns: int, data: st.DataObject) -> None:
    pattern = SlidePattern.parse(f"{2 * n - 2}:{2 * n}")
    assert pattern == SlidePattern.parse(f"2_{2 * n}") == SlidePattern(2 * n)
    assert (pattern.expansion, 1 / pattern.density) == (2 - Fraction(2, n), Fraction(n, n - 1))
    phase = data.draw(st.integers(0, 2 * n - 1))
    layout = pattern.layout(columns, phase)
    assert layout == SlideLayout(columns, phase, 2 * n)
    assert layout.windows == n - 1
    assert layout.padded == layout.blocks * 2 * n
    assert layout.slided == layout.blocks * (n - 1) * 4 == pattern.expansion * layout.padded
    if columns:  # the fewest blocks that contain phase and row
        assert layout.padded - 2 * n < phase + columns <= layout.padded
    else:
        assert layout.blocks == layout.slided == 0


@pytest.mark.parametrize(("columns", "phase"), [(-1, 0), (8, -1), (8, 8)])
def test_layout_refuses_invalid_sizes(columns: int, phase: int) -> None:
    with pytest.raises(ValueError, match=f"{columns} in-features at phase {phase}"):
        SlidePattern.parse("6:8").layout(columns, phase)


@given(st.integers(2, 20), st.integers(0, 10_000))
def test_shard_phase_aligns_blocks_with_the_whole_row(n: int, start: int) -> None:
    phase = SlidePattern(2 * n).shard_phase(start)
    assert 0 <= phase < 2 * n
    assert (start - phase) % (2 * n) == 0
    assert SlidePattern.parse("2_inf").shard_phase(start) == 0


def test_parse_mixed_patterns() -> None:
    half = parse_pattern("2_4@50%")
    assert isinstance(half, MixedPattern)
    assert (half.ratio, half.flag, half.density) == ("2:4@50%", "2:4@50%", Fraction(3, 4))
    assert str(half) == "2:4@50% (2 of every 4 pruned in 50% of the blocks)"
    assert parse_pattern("2:4@33.3%") == MixedPattern(Fraction(333, 1000))
    assert str(parse_pattern(" Dense ")) == "dense (nothing pruned)"
    assert parse_pattern("6:8") == SlidePattern(8)
    for text in ("33.333333", "99.999999", "12.3", "0.000001", "10"):  # metadata hold the ratio as text
        pattern = MixedPattern.parse(f"2:4@{text}%")
        assert (pattern.ratio, MixedPattern.parse(pattern.ratio)) == (f"2:4@{text}%", pattern)
    for text in ("6:8@50%", "2:4@50", "2:4@", "2:4@-1%", "2:4@5e1%"):
        with pytest.raises(PatternError, match="is not a share of 2:4 blocks"):
            parse_pattern(text)
    with pytest.raises(PatternError, match="less than 100% .* found 100%"):
        parse_pattern("2:4@100%")
