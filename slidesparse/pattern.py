"""The (2N-2):2N sparsity patterns and the geometry of their sliding windows.  Standard library only.

A pattern ``(2N-2):2N`` allows at most 2N-2 non-zeros in each block of L = 2N consecutive weights of a row.
N-1 windows of four weights, two apart, cover the block; each holds at most two non-zeros, which is the
2:4 form that sparse tensor cores execute (arXiv 2603.05232, section 3).  For 6:8, L = 8::

    block        a0 a1 a2 a3 a4 a5 a6 a7
    window 0     a0 a1 a2 a3
    window 1           a2 a3 a4 a5
    window 2                 a4 a5 a6 a7
    slided row   a0 a1 a2 a3|a2 a3 a4 a5|a4 a5 a6 a7      each weight in one window, zero in the other

so K in-features become gamma * K = (2 - 2/N) * K, at half the multiplications per element.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

from slidesparse.errors import SlideSparseError, shown

HARDWARE_NONZEROS, HARDWARE_LENGTH = 2, 4  # 2:4, which sparse tensor cores execute
STRIDE = HARDWARE_LENGTH - HARDWARE_NONZEROS
MAX_LENGTH = 4096  # longest block; beyond it gamma is 2 to within 0.1%
ZEROS = 2  # every pattern of the family prunes two weights of a block

EXAMPLES = "2:4, 4:6, 6:8, 8:10, 10:12, 12:14, 14:16 (or 2_4, 2_6, 2_8, ...), 2_inf, and dense"
DENSE_WEIGHT = "dense"  # the spelling for a weight that is not pruned
MIXED_EXAMPLES = "2:4@33%, 2:4@50%, 2:4@67%"


class PatternError(SlideSparseError, ValueError):
    """A sparsity pattern cannot be parsed, or a weight breaks its pattern."""


@dataclass(frozen=True)
class SlidePattern:
    """A (2N-2):2N pattern; ``length`` is L = 2N, or None for ``2_inf``.

    ``2_inf`` takes a row of any weights as one block with two padding zeros, so that every dense weight
    obeys it.  It validates the machinery at gamma = 2 and gains nothing.
    """

    length: int | None

    def __post_init__(self) -> None:
        if self.length is None or (HARDWARE_LENGTH <= self.length <= MAX_LENGTH and self.length % 2 == 0):
            return
        raise PatternError(
            f"block length {self.length} is not an even number from {HARDWARE_LENGTH} to {MAX_LENGTH}; "
            f"use one of {EXAMPLES}"
        )

    @classmethod
    def parse(cls, text: str) -> SlidePattern:
        """Read ``"6:8"`` (non-zeros : length) or ``"2_8"`` (zeros _ length): the same pattern.

        Raises PatternError that names what was found, what is allowed and, where it can be guessed, what was meant.
        """
        normalized = text.strip().lower()
        if normalized in ("2_inf", "2_\N{INFINITY}"):
            return cls(None)
        match = re.fullmatch(r"([0-9]{1,9})([:_])([0-9]{1,9})", normalized)
        if not match:
            raise PatternError(f"sparsity {shown(text)} is not a pattern; use one of {EXAMPLES}")
        first, separator, length = int(match[1]), match[2], int(match[3])
        zeros = first if separator == "_" else length - first
        if zeros != ZEROS:
            hint = ""
            if first in (ZEROS, length - ZEROS):
                with suppress(PatternError):  # for an odd length
                    hint = f"; did you mean {cls(length)}?"
            raise PatternError(
                f"sparsity {shown(text)} prunes {zeros} of every {length} weights, "
                f"but the windows cover exactly {ZEROS} of an even number; use one of {EXAMPLES}{hint}"
            )
        return cls(length)

    @property
    def ratio(self) -> str:
        """The paper's spelling, non-zeros : length, such as ``6:8``."""
        return "2_inf" if self.length is None else f"{self.length - ZEROS}:{self.length}"

    @property
    def flag(self) -> str:
        """The environment flag's spelling, zeros _ length, such as ``2_8``."""
        return "2_inf" if self.length is None else f"{ZEROS}_{self.length}"

    def __str__(self) -> str:
        if self.length is None:
            return "2_inf (nothing pruned)"
        return f"{self.ratio} ({ZEROS} of every {self.length} pruned)"

    @property
    def density(self) -> Fraction:
        """The largest share of non-zeros: (2N-2)/2N, 1 for 2_inf; its inverse, N/(N-1), bounds the speedup."""
        return Fraction(1) if self.length is None else Fraction(self.length - ZEROS, self.length)

    @property
    def expansion(self) -> Fraction:
        """gamma, slided in-features over in-features: 2 - 2/N, 2 for 2_inf."""
        return 2 * self.density

    def layout(self, in_features: int, phase: int = 0) -> SlideLayout:
        """Return where the windows of a row of ``in_features`` weights lie.

        ``phase`` columns of the first block belong to another tensor-parallel shard (see `shard_phase`).
        """
        if in_features < 0 or phase < 0 or (self.length is not None and phase >= self.length):
            raise ValueError(
                f"layout of {in_features} in-features at phase {phase}: both must be at least 0, and the phase "
                f"below the block length {self.length}"
            )
        if self.length is None:  # the block is the row, padded to even, with one padding pair
            return SlideLayout(in_features, 0, max(in_features + in_features % 2, 2) + ZEROS)
        return SlideLayout(in_features, phase, self.length)

    def shard_phase(self, start: int) -> int:
        """Return how many columns of its block lie before global column ``start``, where a shard begins."""
        return 0 if self.length is None else start % self.length


@dataclass(frozen=True)
class MixedPattern:
    """Blocks of 64 out-features x 128 in-features: a share of them is 2:4, the others keep all weights.

    Nothing is slid.  Which blocks are 2:4 can be seen from their zeros, and is stored nowhere (`slidesparse.blocks`).
    ``dense`` asks for no zeros at all.
    """

    share: Fraction  # share of the 2:4 blocks of a weight, blocks at its edges included; at least 0, below 1

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise PatternError(
                f"less than 100% of the blocks of a mixed weight are 2:4, found {float(100 * self.share):.6g}%; "
                f"use one of {MIXED_EXAMPLES}, 2:4, or {DENSE_WEIGHT}"
            )

    @classmethod
    def parse(cls, text: str) -> MixedPattern:
        """Read ``"2:4@50%"`` or ``"dense"``.  Raises PatternError."""
        if text.strip().lower() == DENSE_WEIGHT:
            return cls(Fraction(0))
        match = re.fullmatch(r"\s*2[:_][24]@([0-9]{1,3}(?:\.[0-9]{1,6})?)%\s*", text)
        if not match:
            raise PatternError(
                f"sparsity {shown(text)} is not a share of 2:4 blocks; use one of {MIXED_EXAMPLES}"
            )
        return cls(Fraction(match[1]) / 100)

    @property
    def ratio(self) -> str:
        """The spelling that `parse` reads, such as ``2:4@50%``."""
        return f"2:4@{self._percent}" if self.share else DENSE_WEIGHT

    @property
    def flag(self) -> str:
        """The environment flag's spelling: the same."""
        return self.ratio

    def __str__(self) -> str:
        if not self.share:
            return f"{DENSE_WEIGHT} (nothing pruned)"
        return f"{self.ratio} (2 of every 4 pruned in {self._percent} of the blocks)"

    @property
    def _percent(self) -> str:
        """The share with all the digits that `parse` takes."""
        return f"{float(100 * self.share):.6f}".rstrip("0").rstrip(".") + "%"

    @property
    def length(self) -> int:
        """The length of the groups in which two weights are pruned, in the blocks that are 2:4."""
        return HARDWARE_LENGTH

    @property
    def density(self) -> Fraction:
        """The largest share of non-zeros."""
        return 1 - self.share / 2


Pattern = SlidePattern | MixedPattern


def parse_pattern(text: str) -> Pattern:
    """Parse a `SlidePattern` or a `MixedPattern`.  Raises PatternError."""
    mixed = "@" in text or text.strip().lower() == DENSE_WEIGHT
    return MixedPattern.parse(text) if mixed else SlidePattern.parse(text)


@dataclass(frozen=True)
class SlideLayout:
    """Windows over one row of K weights, preceded by ``phase`` zeros and followed by zeros up to whole blocks."""

    in_features: int  # K
    phase: int  # zero columns on the left, below the block length
    length: int  # L, even

    @property
    def blocks(self) -> int:
        """The number of blocks of L weights that the phase and the row fill, the last one perhaps in part."""
        return -(-(self.phase + self.in_features) // self.length) if self.in_features else 0

    @property
    def padded(self) -> int:
        """The columns of the padded row: blocks * L."""
        return self.blocks * self.length

    @property
    def windows(self) -> int:
        """The number of windows of a block: N - 1."""
        return self.length // 2 - 1

    @property
    def slided(self) -> int:
        """K', the columns of the slided row: blocks * (N-1) * 4."""
        return self.blocks * self.windows * HARDWARE_LENGTH


def round_up(count: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is at least ``count``."""
    return -(-count // multiple) * multiple
