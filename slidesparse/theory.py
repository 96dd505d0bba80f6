"""Sliding windows in general: Z:L sparsity on M:N hardware.  Exact fractions, standard library only.

This is the theory of appendix C of arXiv 2603.05232; `slidesparse.pattern` is its case M:N = 2:4.  A block
of L weights, at most Z of them non-zero, is covered by w windows of N, a stride apart; each takes at most M
non-zeros.

Where this module departs from the appendix:

* Theorem 2 (C.1.4) says that a capacity w * M >= Z suffices.  It does for a stride of at most M, as on 2:4
  hardware (stride N - M = 2 = M), and not beyond: at the appendix's stride N - M > M only window 0 sees
  the first N - M positions but takes M.  2:7 on 1:4 hardware has two windows of one non-zero each, yet positions
  0 and 1 both need window 0.  The proof assumes that a window rejects at most M non-zeros; it can reject
  N - M.  `Windows.bottleneck` is exact.
* Equation (8) gives a whole number of windows only when N - M divides L - N; other lengths are refused here.
* C.1.7 says that 1:4 hardware reaches the bound L/Z for every pattern, with Z windows and gamma = 4Z/L.  That
  needs windows placed after looking at the non-zeros (`gathered_expansion`), hence others for each row of
  weights, and an activation that is lifted anew for each row: no longer one matrix product.  Windows that are
  the same for all rows reach the bound if and only if M divides Z and L - Z <= N - M, see `reaches_bound`; on
  1:4 hardware, with at most three zeros a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from slidesparse.errors import SlideSparseError


class TheoryError(SlideSparseError, ValueError):
    """Numbers describe no sparsity pattern, no hardware, or no whole number of windows."""


@dataclass(frozen=True)
class Hardware:
    """M:N hardware: of every N consecutive weights it multiplies M, at N/M times the dense rate."""

    nonzeros: int  # M
    length: int  # N

    def __post_init__(self) -> None:
        if not 0 < self.nonzeros < self.length:
            raise TheoryError(f"M:N hardware has 0 < M < N, found {self.nonzeros}:{self.length}")

    @property
    def speedup(self) -> Fraction:
        """alpha = N/M over dense execution: the peak rate, which real kernels do not reach."""
        return Fraction(self.length, self.nonzeros)


TWO_FOUR = Hardware(2, 4)
ONE_FOUR = Hardware(1, 4)  # hypothetical


@dataclass(frozen=True)
class Windows:
    """Windows over a block of ``length`` weights with at most ``nonzeros`` non-zero, the same for every row.

    ``stride`` is N - M unless given, as in C.1.2.  A stride of M wastes no capacity on any hardware.
    """

    nonzeros: int  # Z
    length: int  # L
    hardware: Hardware = TWO_FOUR
    stride: int = 0  # 0: N - M

    def __post_init__(self) -> None:
        n = self.hardware.length
        if not self.stride:
            object.__setattr__(self, "stride", n - self.hardware.nonzeros)
        if not 0 < self.nonzeros <= self.length:
            raise TheoryError(f"a Z:L pattern has 0 < Z <= L, found {self.nonzeros}:{self.length}")
        if not 0 < self.stride <= n:
            raise TheoryError(f"windows of {n} leave no gap at strides 1 to {n}, found {self.stride}")
        if self.length < n or (self.length - n) % self.stride:
            raise TheoryError(
                f"windows of {n}, {self.stride} apart, do not end with a block of {self.length}; "
                f"use a length of {n} plus a multiple of {self.stride}"
            )

    @property
    def count(self) -> int:
        """w = (L - N) / stride + 1, equation (8)."""
        return (self.length - self.hardware.length) // self.stride + 1

    @property
    def capacity(self) -> int:
        """w * M: non-zeros that all windows take together."""
        return self.count * self.hardware.nonzeros

    @property
    def expansion(self) -> Fraction:
        """gamma = w * N / L, equation (9)."""
        return Fraction(self.count * self.hardware.length, self.length)

    @property
    def speedup(self) -> Fraction:
        """S_eff = alpha / gamma, section C.1.6; it holds only when the windows cover (`bottleneck` is None)."""
        return self.hardware.speedup / self.expansion

    def seen_only_by(self, first: int, last: int) -> int:
        """Return how many positions of the block lie in no window but ``first`` to ``last``."""
        n, s = self.hardware.length, self.stride
        start = first and (first - 1) * s + n  # where the window before ends
        stop = self.length if last == self.count - 1 else (last + 1) * s  # where the window after begins
        return max(0, stop - start)

    def bottleneck(self) -> tuple[int, int] | None:
        """Return the first interval of windows that some block overfills, or None: then every Z:L block fits.

        Hall's condition.  A position is seen by consecutive windows, so a block fits if and only if no
        interval of k windows is the only one to see more than k * M of its non-zeros.  The worst block puts
        as many of its Z as it can where only that interval sees: it fits if min(Z, `seen_only_by`) <= k * M.
        Left-to-right greedy allocation, leftmost non-zeros first, then succeeds: it serves first what expires
        first.

        At the appendix's stride N - M this comes to: Z <= w * M, and N <= 2M or Z <= M.
        """
        for k in range(1, self.count + 1):
            for first in range(self.count - k + 1):
                if min(self.nonzeros, self.seen_only_by(first, first + k - 1)) > k * self.hardware.nonzeros:
                    return first, first + k - 1
        return None

    @property
    def covers(self) -> bool:
        """Whether every block of the pattern fits, without loss."""
        return self.bottleneck() is None


def density_bound(nonzeros: int, length: int) -> Fraction:
    """Return L/Z, the largest S_eff of any windows that cover (Theorem 3).

    A cover needs at least Z/M windows, so gamma >= ZN/(ML), and S_eff = (N/M) / gamma <= L/Z.
    """
    if not 0 < nonzeros <= length:
        raise TheoryError(f"a Z:L pattern has 0 < Z <= L, found {nonzeros}:{length}")
    return Fraction(length, nonzeros)


def reaches_bound(nonzeros: int, length: int, hardware: Hardware = TWO_FOUR) -> bool:
    """Return whether windows that are the same for all rows, of any N positions each, can reach S_eff = L/Z.

    They can if and only if M divides Z and a block has no more zeros than a group of the hardware: L - Z <= N - M.

    This is necessary: the bound takes exactly Z/M windows.  L - N positions are outside a given window; non-zeros
    there have the other windows only, so min(Z, L - N) <= Z - M.
    It is sufficient: take windows of L - Z + M positions (at most N), M apart.
    """
    density_bound(nonzeros, length)
    m, n = hardware.nonzeros, hardware.length
    if length < n:
        raise TheoryError(f"a block of {length} is shorter than the hardware's group of {n}")
    return nonzeros % m == 0 and length - nonzeros <= n - m


def gathered_expansion(nonzeros: int, length: int, hardware: Hardware = TWO_FOUR) -> Fraction:
    """Return gamma of ceil(Z/M) windows gathered anew for each row of weights, as C.1.7 assumes: 4Z/L for 1:4.

    It is a lower bound for any windows.  The lifted activation then depends on the row of weights as well.
    """
    density_bound(nonzeros, length)
    return Fraction(-(-nonzeros // hardware.nonzeros) * hardware.length, length)


def paired(nonzeros: int, length: int, whole_pairs: bool) -> tuple[int, int]:
    """Return Z':L', counted in pairs of adjacent values, which two successive Z:L blocks of values always obey.

    Blackwell's sparse FP4 takes two of every four pairs: `Windows` over Z':L' are windows of 8 values, 4 apart.

    They cover (2N-2):2N values whose zeros come in ``whole_pairs``, of values 2i and 2i + 1, at the same S_eff: a
    block has N-1 of N pairs, so two blocks have 2N-2 of 2N.  They cover no (2N-2):2N values otherwise: each pair of
    a block can have one of its Z >= L/2 non-zeros, and then no pair may be dropped.
    """
    density_bound(nonzeros, length)
    if length % 2 or (whole_pairs and nonzeros % 2):
        raise TheoryError(f"pairs need even numbers, found {nonzeros}:{length}")
    touched = nonzeros // 2 if whole_pairs else min(nonzeros, length // 2)
    return 2 * touched, length
