"""Loading for the Hopper kernels, slide and pack, against `hopper_format.pack`: bit for bit, interpreted and on a GPU.

As in test_kernel_slide_weight.py the interpreter's cases run in a process of their own, this file as a program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import interpreter
import pytest
import torch
from strategies import FILLS, assert_same_bits, is_zero, obeying, raw
from torch import Tensor

from slidesparse.gemm import hopper, hopper_format
from slidesparse.pattern import SlidePattern
from slidesparse.quantize import FP8, INT8
from slidesparse.slide import slide

ROOT = Path(__file__).parent.parent
DTYPES = (INT8, FP8)
# pattern, N, K, phase: whole strips and blocks, tails of both, one element, phases
GEOMETRIES = [
    ("2:4", 64, 128, 0),
    ("2:4", 65, 132, 0),
    ("2:4", 1, 1, 0),
    ("6:8", 64, 256, 0),
    ("6:8", 130, 90, 3),
    ("4:6", 70, 193, 2),
    ("14:16", 3, 300, 15),
    ("2_inf", 66, 70, 0),
]
LARGE = [("6:8", 4608, 3584, 0), ("2:4", 1000, 18944, 0), ("4:6", 3584, 3585, 1)]


def plus_zero(w: Tensor) -> Tensor:
    """``w`` with +0.0 for -0.0."""
    return torch.where(is_zero(w), 0, raw(w)).view(w.dtype)


def check_loading(
    pattern: str, n: int, k: int, phase: int, dtype: torch.dtype, fill: str, device: str
) -> None:
    """Whole, and in chunks of one strip."""
    parsed = SlidePattern.parse(pattern)
    weight = obeying(parsed, n, k, phase, dtype, fill, n + k)
    layout = parsed.layout(k, phase)
    expected = hopper_format.pack(plus_zero(slide(weight, parsed, phase)))
    provider, whole = hopper.Hopper(), hopper.CHUNK
    try:
        for hopper.CHUNK in (whole, 1):
            found, broken = provider.slide_and_pack(weight.to(device), layout)
            assert broken == 0
            assert_same_bits(found.cpu(), expected)
    finally:
        hopper.CHUNK = whole


def check_pack_of_windows(device: str) -> None:
    """Every way in which up to two of four are not zero, at every place of a block, by the kernel alone."""
    from slidesparse.kernels.pack_weight import pack_weight

    ways = torch.tensor([kept for kept in product((0, 1), repeat=4) if sum(kept) <= 2], dtype=torch.int8)
    order = torch.arange(64 * 64) * 7 % len(ways)  # 7 and 11 have no common divisor
    values = torch.randint(1, 127, (64, 256), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    weight = ways[order].reshape(64, 256) * values
    assert int((weight != 0).sum()) > 0
    for dtype in DTYPES:
        windows = weight.to(device).view(dtype)
        packed = torch.full(
            (hopper_format.packed_bytes(64, 256) + 32,), 0x55, dtype=torch.uint8, device=device
        )
        pack_weight(windows, packed[16:-16])
        assert_same_bits(packed[16:-16].cpu(), hopper_format.pack(weight.view(dtype)))
        assert bool((packed[:16] == 0x55).all())
        assert bool((packed[-16:] == 0x55).all())


def check_broken_blocks(device: str) -> None:
    weight = torch.zeros(70, 40, dtype=INT8)
    weight[69, 8:15], weight[3, 0:8] = 1, 1
    layout = SlidePattern(8).layout(40)
    assert hopper.Hopper().slide_and_pack(weight.to(device), layout)[1] == 2


def check_nothing(device: str) -> None:
    for n, k in ((0, 64), (3, 0)):
        found, broken = hopper.Hopper().slide_and_pack(
            torch.zeros(n, k, dtype=INT8, device=device), SlidePattern(8).layout(k)
        )
        assert (found.numel(), broken) == (0, 0)


def check_refusals(device: str) -> None:
    from slidesparse.kernels.pack_weight import pack_weight

    windows = torch.zeros(64, 256, dtype=INT8, device=device)
    packed = torch.zeros(10240, dtype=torch.uint8, device=device)
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "windows has dtype torch.int16", lambda: pack_weight(windows.short(), packed)),
        (TypeError, "packed has dtype torch.int8", lambda: pack_weight(windows, packed.view(INT8))),
        (ValueError, "a multiple of 128, at", lambda: pack_weight(windows[:, :128], packed)),
        (ValueError, "windows has shape \\(63, 256\\)", lambda: pack_weight(windows[:63], packed)),
        (ValueError, "packed has 10000 bytes .* take 10240", lambda: pack_weight(windows, packed[:10000])),
    ]
    for error, words, call in refused:
        with pytest.raises(error, match=words):
            call()


def cases(large: bool) -> Iterator[tuple[str, Callable[[str], None]]]:
    """(name, check), the check to be called with a device."""
    for dtype in DTYPES:
        for pattern, n, k, phase in (*GEOMETRIES, *(LARGE if large else ())):
            fills = FILLS if large and n < 1000 else FILLS[:1]
            for fill in fills:
                name = f"{pattern} N={n} K={k} phase={phase} {fill} {dtype}".replace("torch.", "")
                yield name, partial(check_loading, pattern, n, k, phase, dtype, fill)
    yield "windows", check_pack_of_windows
    yield "broken blocks", check_broken_blocks
    yield "nothing", check_nothing
    yield "refusals", check_refusals


INTERPRETED = dict(cases(large=False))
ON_GPU = dict(cases(large=True))


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    """What each case of the interpreter said, None where it passed."""
    return interpreter.run(__file__)


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(interpreted: dict[str, str | None], name: str) -> None:
    assert interpreted[name] is None, interpreted[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_on_the_gpu(name: str) -> None:
    """On any GPU: the packer is no Hopper kernel."""
    ON_GPU[name]("cuda")


if __name__ == "__main__":
    interpreter.report(INTERPRETED)
