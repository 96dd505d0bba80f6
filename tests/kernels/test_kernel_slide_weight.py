"""The kernel that slides weights against `slidesparse.slide.slide`, bit for bit: interpreted, and on the GPU.

Whether kernels are interpreted is decided when Triton is imported, so those cases run in a process of their own, this
file as a program: it prints one JSON line a case.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import interpreter
import pytest
import torch
from strategies import FILLS, assert_same_bits, is_zero, obeying, raw
from torch import Tensor

from slidesparse.kernels import Config
from slidesparse.pattern import SlideLayout, SlidePattern
from slidesparse.prune import METHODS, prune
from slidesparse.quantize import FP8, INT8
from slidesparse.slide import nonzero, obeys, slide, violations

DTYPES = (INT8, FP8)
SMALL = Config(4, 8, 1)  # several programs in both dimensions even for the small weights of these tests
NAN_CODES, NEGATIVE_ZERO, GUARD = (0x7F, -1), -128, 0x55
PADDING = 28  # padding columns of out after K'

# block length, K, phase: full blocks, tails, odd and even K and phases, one block, only padding
GEOMETRIES = [
    (4, 32, 0),
    (4, 33, 3),
    (6, 72, 0),
    (6, 70, 2),
    (8, 80, 0),
    (8, 76, 6),
    (8, 37, 3),
    (8, 1, 7),
    (8, 2, 7),
    (10, 34, 5),
    (12, 66, 4),
    (14, 70, 0),
    (16, 66, 15),
    (18, 90, 2),
    (34, 100, 33),
    (34, 102, 0),
    (64, 200, 10),
    (66, 134, 0),  # processed in a loop that is not unrolled
    (68, 139, 4),
]
LARGE = [
    (8, 3584, 0),
    (6, 3584, 0),
    (8, 18944, 4),
    (6, 18943, 1),
    (16, 4096, 0),
    (34, 2048, 0),
    (64, 4090, 63),
]


def random_codes(n: int, k: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return random codes [n, k], in which zeros, -0.0 and NaNs are frequent."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int16).to(torch.int8)
    kind = torch.randint(0, 12, (n, k), generator=generator)
    codes[kind == 0] = 0
    if dtype == FP8:
        codes[kind == 1] = NEGATIVE_ZERO
        for number, nan in enumerate(NAN_CODES, 2):
            codes[kind == number] = nan
    return codes.view(dtype)


def bytes_of(shape: tuple[int, ...], value: int, device: str | torch.device) -> Tensor:
    return torch.full(shape, value, dtype=torch.int8, device=device)


def gapped(w: Tensor, offset: int, gap: int) -> Tensor:
    """Return ``w`` as a view into wider rows, at ``offset`` bytes and followed by ``gap`` bytes of other values."""
    n, k = w.shape
    wide = bytes_of((n, offset + k + gap), GUARD, w.device)
    wide[:, offset : offset + k] = raw(w)
    return wide[:, offset : offset + k].view(w.dtype)


def run_kernel(w: Tensor, layout: SlideLayout, launch: Config | None = None) -> tuple[Tensor, int]:
    """Return (out [N, K'], broken blocks); check that the kernel zeroes its padding and writes nowhere else."""
    from slidesparse.kernels.slide_weight import slide_weight

    buffer = bytes_of((w.shape[0] + 2, layout.slided + PADDING + 8), GUARD, w.device)
    inside = buffer[1:-1, 4:-4]
    broken = slide_weight(w, layout.length, layout.phase, inside.view(w.dtype), launch)
    assert (broken.shape, broken.dtype, broken.device) == ((1,), torch.int32, w.device)
    out = inside.clone()
    inside.fill_(GUARD)
    assert bool((buffer == GUARD).all())
    assert not bool(out[:, layout.slided :].any())
    return out[:, : layout.slided].view(w.dtype), int(broken)


def normalised(w: Tensor) -> Tensor:
    """Return ``w`` with -0.0 replaced by +0.0."""
    return torch.where(is_zero(w), 0, raw(w)).view(w.dtype)


def check_geometry(length: int, k: int, phase: int, dtype: torch.dtype, n: int, device: str) -> None:
    """Check weights that obey their pattern, in aligned rows, unaligned rows and rows with gaps."""
    pattern = SlidePattern(length)
    weights = [prune(random_codes(n, k, dtype, 1), pattern, method, 2, phase) for method in METHODS]
    weights += [obeying(pattern, n, k, phase, dtype, fill, 3) for fill in FILLS]
    w = torch.cat([raw(some) for some in weights]).view(dtype).to(device)
    layout, expected = pattern.layout(k, phase), normalised(slide(w, pattern, phase))
    for source, launch in ((w, None), (gapped(w, 1, 2), None), (gapped(w, 2, 4), SMALL)):
        original = raw(source).clone()
        slided, broken = run_kernel(source, layout, launch)
        assert_same_bits(slided, expected)
        assert broken == 0
        assert torch.equal(raw(source), original)


def check_violations(length: int, k: int, phase: int, dtype: torch.dtype, n: int, device: str) -> None:
    """Check the count of blocks that break the pattern, and the windows of the others."""
    pattern = SlidePattern(length)
    layout = pattern.layout(k, phase)
    w = random_codes(n, k, dtype, 4).to(device)
    padded = torch.nn.functional.pad(raw(w), (phase, layout.padded - phase - k))
    obeys = nonzero(padded.view(dtype)).reshape(n, layout.blocks, length).sum(-1) <= length - 2
    intact = (padded.reshape(n, layout.blocks, length) * obeys[..., None]).reshape(n, -1)[
        :, phase : phase + k
    ]
    slided, broken = run_kernel(w, layout, SMALL)
    total = violations(w, pattern, phase)
    assert broken == (total.total if total else 0) == int((~obeys).sum())
    windows = raw(slided).reshape(n, layout.blocks, -1) * obeys[..., None]
    expected = normalised(slide(intact.contiguous().view(dtype), pattern, phase))
    assert_same_bits(windows.reshape(n, -1).view(dtype), expected)


def check_whole_rows(dtype: torch.dtype, k: int, n: int, device: str) -> None:
    """Check 2_inf: one block as long as the row, with two zeros."""
    pattern = SlidePattern.parse("2_inf")
    w = random_codes(n, k, dtype, 5).to(device)
    slided, broken = run_kernel(w, pattern.layout(k))
    assert_same_bits(slided, normalised(slide(w, pattern)))
    assert broken == 0


def check_negative_zeros(device: str) -> None:
    """Check that a row of -0.0 becomes zero bits and breaks no pattern."""
    w = bytes_of((3, 40), NEGATIVE_ZERO, device).view(FP8)
    layout = SlidePattern(8).layout(40)
    slided, broken = run_kernel(w, layout)
    assert (bool(raw(slided).any()), broken) == (False, 0)
    # The same bits in INT8 are -128, so every block is full.
    slided, broken = run_kernel(bytes_of((3, 40), NEGATIVE_ZERO, device), layout)
    assert broken == 15
    assert bool((slided == NEGATIVE_ZERO).any())


def check_nothing(device: str) -> None:
    """Check weights without rows or columns: no broken block, and any output is zero."""
    for n, k in ((0, 64), (3, 0), (0, 0)):
        for dtype in DTYPES:
            slided, broken = run_kernel(bytes_of((n, k), 0, device).view(dtype), SlidePattern(8).layout(k))
            assert (slided.shape, broken) == ((n, SlidePattern(8).layout(k).slided), 0)


def check_refusals(device: str) -> None:
    """Check that the kernel refuses invalid arguments and names their values."""
    from slidesparse.kernels.slide_weight import slide_weight

    w, out = bytes_of((4, 16), 0, device), bytes_of((4, 32), 0, device)
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "w has dtype torch.bfloat16", lambda: slide_weight(w.bfloat16(), 8, 0, out)),
        (TypeError, "out has dtype torch.float8_e4m3fn", lambda: slide_weight(w, 8, 0, out.view(FP8))),
        (ValueError, "w has strides \\(1, 16\\)", lambda: slide_weight(w.t(), 8, 0, out)),
        (ValueError, "block length 7 at phase 0", lambda: slide_weight(w, 7, 0, out)),
        (ValueError, "at phase 8", lambda: slide_weight(w, 8, 8, out)),
        (ValueError, "4 rows of at least 24 columns", lambda: slide_weight(w, 8, 0, out[:, :20])),
        (ValueError, "4 rows of at least 24 columns", lambda: slide_weight(w, 8, 0, out[:3])),
        (ValueError, "a multiple of 4", lambda: slide_weight(w, 8, 0, out[:, :26])),
        (ValueError, "must begin at multiples of 4 bytes", lambda: slide_weight(w, 8, 0, out[:, 2:26])),
        (
            ValueError,
            "must begin at multiples of 4 bytes",
            lambda: slide_weight(w, 8, 0, bytes_of((4, 26), 0, device)[:, :24]),
        ),
    ]
    for error, message, call in refused:
        with pytest.raises(error, match=message):
            call()


def cases(large: bool) -> Iterator[tuple[str, Callable[[str], None]]]:
    """Yield (name, check) pairs, where a check takes a device; ``large`` adds sizes for a GPU."""
    sizes = [(3, *geometry) for geometry in GEOMETRIES]
    if large:
        sizes += [(300, *geometry) for geometry in LARGE]
    for dtype in DTYPES:
        kind = str(dtype).removeprefix("torch.")
        for n, length, k, phase in sizes:
            name = f"L={length} K={k} phase={phase} N={n} {kind}"
            yield f"obeying {name}", partial(check_geometry, length, k, phase, dtype, n)
            yield f"breaking {name}", partial(check_violations, length, k, phase, dtype, n)
        for k in (1, 50, 131, 4200, *((3584,) if large else ())):
            yield f"2_inf K={k} {kind}", partial(check_whole_rows, dtype, k, 5)
    yield "negative zeros", check_negative_zeros
    yield "nothing", check_nothing
    yield "refusals", check_refusals


INTERPRETED = dict(cases(large=False))
ON_GPU = dict(cases(large=True))


@pytest.mark.parametrize("name", INTERPRETED)
def test_slide_weight_interpreted(name: str) -> None:
    failure = interpreter.run(__file__)[name]
    assert failure is None, failure


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_slide_weight_on_gpu(name: str) -> None:
    ON_GPU[name]("cuda")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("k", [2048, 2047])  # by pairs, by bytes
def test_slide_weight_beyond_2_31_bytes(k: int) -> None:
    """Offsets need 64 bits: the last rows of both w and out are beyond 2^31 bytes."""
    from slidesparse.kernels.slide_weight import slide_weight

    pattern, period, n = SlidePattern(8), 1024, 2**20 + 2**10 + 5
    layout = pattern.layout(k)
    needed, free = n * (k + layout.slided) + 2**30, torch.cuda.mem_get_info()[0]
    if free < needed:
        pytest.skip(f"needs {needed >> 20} MiB of GPU memory, {free >> 20} MiB are free")
    repeated = prune(random_codes(period, k, INT8, 6), pattern).cuda()
    expected = slide(repeated, pattern)
    w = torch.empty(n, k, dtype=INT8, device="cuda")
    out = torch.full((n, layout.slided), GUARD, dtype=INT8, device="cuda")
    for part in w.split(period):
        part.copy_(repeated[: len(part)])
    assert min(w.numel(), out.numel()) > 2**31
    assert int(slide_weight(w, pattern.length, 0, out)) == 0  # type: ignore[arg-type]
    for start, part in enumerate(out.split(period)):
        assert torch.equal(part, expected[: len(part)]), f"rows from {start * period}"


@pytest.mark.gpu
@pytest.mark.slow
def test_slide_weight_throughput() -> None:
    """The kernel slides 37888 x 3584 INT8 weights at 6:8 at 100 GB/s of source bytes or more.

    The bound does not estimate the kernel's speed, which another user of the GPU may halve. It detects a kernel
    that lost its coalescing or whose lanes work one after another, and it is ten times the rate that sliding and
    compressing together must reach.
    """
    from slidesparse.kernels.slide_weight import slide_weight

    pattern, n, k = SlidePattern(8), 37888, 3584
    layout = pattern.layout(k)
    w = prune(torch.randint(-128, 128, (n, k), dtype=INT8, device="cuda"), pattern)
    out = torch.empty(n, layout.slided, dtype=INT8, device="cuda")
    seconds = []
    for _ in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        slide_weight(w, 8, 0, out)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    assert obeys(out, SlidePattern(4))
    speed = n * k / statistics.median(seconds[5:]) / 1e9
    assert speed >= 100, f"{speed:.0f} GB/s"


if __name__ == "__main__":
    interpreter.report(INTERPRETED)
