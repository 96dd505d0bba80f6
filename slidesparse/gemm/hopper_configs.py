"""How a product of the Hopper kernels can be cut into blocks of threads, and which ways are worth trying.

A configuration stands in the tables of tuned algorithms as text::

    split:2x64/1x4/2     a block computes 2 strips of 64 out-features by 64 tokens; a cluster is 1 block that shares
                         activations by 4 that split K'; 2 blocks live on a multiprocessor
    stream:3x128/2/1     3 strips by 128 tokens, 2 blocks share activations, one on a multiprocessor; as many blocks as
                         the GPU holds, each with an equal part of all the work

Which of them there are kernels for, and how many blocks a GPU holds, the kernels' library says (`Fit`): none of that
is written here a second time.  `candidates` orders configurations by a model of the time that they take.  For a shape
that is not tuned the first one runs, so the model need not be exact, but must not miss by much.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from slidesparse.gemm.hopper_format import BLOCK, BLOCK_BYTES, strips_of

SPLIT, STREAM = "split", "stream"  # kernels: a cluster a tile, or an equal share of the whole for every block

# What is worth asking the library for.
TOKENS = (8, 16, 32, 64, 128, 256)
STRIPS = (1, 2, 3, 4, 5)
SHARERS = (1, 2, 4)
SPLITS = (1, 2, 3, 4, 5, 6, 8)
RESIDENT = (1, 2, 3)
MOST_IN_CLUSTER = 8
USEFUL_STAGES = 3

MULTIPROCESSOR_BYTES = 228 << 10  # of shared memory
BLOCK_MOST_BYTES = 227 << 10  # of a block's
SYSTEM_BYTES = 1 << 10  # of each block, taken by the system

# Of the model, fitted on an H200 (INT8, Qwen2.5-7B's layers at 2:4 and 6:8) to 1280 products of 256 to 8192 tokens and
# to 400 of fewer, of earlier forms of the kernels.  Of the present form, 967 problems as `slidesparse tune` timed them
# (five models' layers, INT8 and FP8, 2:4 to 8:10): the configuration of the least predicted time takes 4% longer than
# the best of sixteen in the mean and 16% in the worst twentieth with 256 tokens and more, 8% and 25% with fewer; a new
# fit to half of them did no better on the others.  PARTS_US was not fitted: it is what docs/kernels.md says of sums
# that go through memory.
MEMORY_RATE, CACHE_RATE, PORT_BYTES, CLOCK = 4.2e6, 8.0e6, 128, 2000.0  # bytes a us, a cycle; cycles a us
L2_BYTES = 23e6  # of activations that stay there
ENOUGH = 116  # multiprocessors that together saturate the memory
SHARPNESS = 3.6  # how much the longest of several times counts alone
SHARING = {SPLIT: 0.06, STREAM: 0.07}  # for each block more that shares activations: they wait for each other
START_US = 5.0
SPLIT_US, STREAM_US, PARTS_US = 1.2, 0.8, 5.0
EXCHANGE_US, OUTPUT_US, PARTED_US, WHOLE_US = (
    0.53,
    0.04,
    1.7,
    0.15,
)  # for a tile's strips times tokens over 64


@dataclass(frozen=True, order=True)
class Config:
    """A way to run a product; see the top of the file."""

    design: str
    strips: int
    tokens: int
    sharers: int
    splits: int  # 1 of STREAM
    resident: int

    def __str__(self) -> str:
        cluster = f"{self.sharers}x{self.splits}" if self.design == SPLIT else str(self.sharers)
        return f"{self.design}:{self.strips}x{self.tokens}/{cluster}/{self.resident}"

    @property
    def cluster(self) -> int:
        """Blocks of threads of a cluster."""
        return self.sharers * self.splits

    @property
    def shared_bytes(self) -> int:
        """The shared memory that a block may have."""
        return min(BLOCK_MOST_BYTES, MULTIPROCESSOR_BYTES // self.resident - SYSTEM_BYTES)


@dataclass(frozen=True)
class Fit:
    """How a configuration fits a GPU."""

    stages: int  # of the ring in a block's shared memory, for long rows; 0: no kernel was compiled for it, or too few
    clusters: int  # that the GPU holds at a time


Fits = Callable[[Config], Fit]


def parse(text: str) -> Config | None:
    """What ``str`` of a configuration wrote; None for anything else."""
    number = r"([1-9]\d*)"
    split = re.fullmatch(f"split:{number}x{number}/{number}x{number}/{number}", text)
    stream = re.fullmatch(f"stream:{number}x{number}/{number}/{number}", text)
    if split:
        strips, tokens, sharers, splits, resident = map(int, split.groups())
        return Config(SPLIT, strips, tokens, sharers, splits, resident)
    if stream:
        strips, tokens, sharers, resident = map(int, stream.groups())
        return Config(STREAM, strips, tokens, sharers, 1, resident)
    return None


def tile(m: int) -> int:
    """The fewest tokens of a block that hold ``m``, else the most there are."""
    return next((tokens for tokens in TOKENS if tokens >= m), max(TOKENS))


def candidates(n: int, k: int, m: int, multiprocessors: int, most: int, fits: Fits) -> list[Config]:
    """Up to ``most`` configurations for weights [n, k] and ``m`` tokens, that of the least predicted time first."""
    found = []
    for config in _all(n, k, m):
        fit = fits(config)
        held = fit.clusters * config.cluster
        if fit.stages < USEFUL_STAGES or held <= multiprocessors * (config.resident - 1):
            continue  # as many blocks as it says find no room
        if config.design == SPLIT and _tiles(config, n, m) * config.cluster <= multiprocessors * (
            config.resident - 1
        ):
            continue  # there are not as many
        found.append((predicted_us(config, n, k, m, multiprocessors, fit.clusters), config))
    return [config for _, config in sorted(found)[:most]]


def _tiles(config: Config, n: int, m: int) -> int:
    """Tiles, each of a cluster's sharers."""
    return -(-strips_of(n) // (config.strips * config.sharers)) * -(-m // config.tokens)


def _all(n: int, k: int, m: int) -> Iterator[Config]:
    widest = tile(m)
    widths = [tokens for tokens in TOKENS if (widest if m <= 64 else widest // 4) <= tokens <= widest]
    blocks, rows = -(-k // BLOCK), strips_of(n)
    for tokens, sharers, resident, strips in product(widths, SHARERS, RESIDENT, STRIPS):
        if strips > 1 and (strips - 1) * sharers >= rows:
            continue  # nothing to do for a part of each block
        ways = [
            (SPLIT, splits) for splits in SPLITS if splits <= blocks and sharers * splits <= MOST_IN_CLUSTER
        ]
        for design, splits in (*ways, (STREAM, 1)):
            yield Config(design, strips, tokens, sharers, splits, resident)


def predicted_us(config: Config, n: int, k: int, m: int, multiprocessors: int, clusters: int) -> float:
    """Microseconds: of the times that memory, cache, shared memory and tensor cores take, mostly the longest.

    ``clusters`` are held by the GPU at a time.  The tensor cores take a cycle for two tokens, at least 8 cycles, to
    multiply a strip by 64 columns.  Each strip reads all activations of its block from shared memory.
    """
    strips, blocks, tiles = strips_of(n), -(-k // BLOCK), _tiles(config, n, m)
    whole = tiles * config.sharers * blocks  # stages, if a block of threads took all of a tile's columns
    if config.design == STREAM:
        count, fill = clusters * config.cluster, 1.0
        stages = whole / min(count, multiprocessors)
    else:
        count, waves = tiles * config.cluster, -(-tiles // clusters)
        fill = count / (waves * multiprocessors * config.resident) if waves > 1 else 1.0
        stages = -(-count // multiprocessors) * blocks / config.splits
    rate = min(1.0, min(count, multiprocessors) / ENOUGH) * fill
    weight = strips * blocks * BLOCK_BYTES
    activations = tiles * blocks * BLOCK * min(config.tokens, m) * math.sqrt(config.sharers)
    read = weight * -(-m // config.tokens) + activations
    # Blocks that share a tile's columns read others than their neighbours at a time: from memory what L2 does not hold.
    parted = 1 - max(0, tiles // clusters - 1) * clusters / tiles if config.design == STREAM else 0.0
    missed = read * parted * max(0.0, 1 - L2_BYTES / (m * blocks * BLOCK))
    # bytes of a stage: what is read, and half of what is written, which partly goes beside
    moved = config.tokens * BLOCK * (config.strips + 0.5) + 1.5 * config.strips * BLOCK_BYTES
    times = (
        (weight + m * (blocks * BLOCK + 2 * n) + missed) / MEMORY_RATE / rate,
        read / CACHE_RATE / rate,
        stages * moved / PORT_BYTES / CLOCK,
        stages * 2 * config.strips * max(config.tokens / 2, 8) / CLOCK,
    )
    sharing = 1 + SHARING[config.design] * (config.sharers - 1)
    longest = sum(time**SHARPNESS for time in times) ** (1 / SHARPNESS)
    return float(longest * sharing) + _around_us(config, tiles, multiprocessors)


def _around_us(config: Config, tiles: int, multiprocessors: int) -> float:
    """What does not shrink with the work: the start, and what happens to a tile of sums."""
    tile = config.tokens * config.strips / 64
    if config.design == STREAM:  # tiles that several blocks have a part of go through memory
        if tiles * config.sharers < multiprocessors:
            return START_US + PARTS_US + PARTED_US * tile
        return START_US + STREAM_US + WHOLE_US * tile
    exchange = (
        SPLIT_US + EXCHANGE_US * tile * (config.splits - 1) / config.splits if config.splits > 1 else 0.0
    )
    return START_US + exchange + OUTPUT_US * tile
