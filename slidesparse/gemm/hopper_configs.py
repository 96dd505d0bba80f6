"""How a product of the Hopper kernels can be cut into blocks of threads, and which ways are worth trying.

A configuration stands in the tables of tuned algorithms as text::

    split:2x64/1x4/2     a block computes 2 strips of 64 out-features by 64 tokens; a cluster is 1 block that shares
                         activations by 4 that split K'; 2 blocks live on a multiprocessor
    stream:3x128/2/1     3 strips by 128 tokens, 2 blocks share activations, one on a multiprocessor; as many blocks as
                         the GPU holds, each with an equal part of all the work

`candidates` orders configurations by a model of the time that they take.  For a shape that is not tuned the first one
runs, so the model need not be exact, but must not miss by much.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from slidesparse.gemm.hopper_format import BLOCK, BLOCK_BYTES, STRIP, strips_of

SPLIT, STREAM = "split", "stream"  # kernels: a cluster a tile, or an equal share of the whole for every block
STRIPS = {8: 5, 16: 5, 32: 5, 64: 5, 128: 3, 256: 2}  # tokens of a block -> most strips
LEAST_STRIPS = {256: 2}  # 1 for the others
SHARERS = (1, 2, 4)
SPLITS = (1, 2, 4, 8)
RESIDENT = (1, 2, 3)
MOST_IN_CLUSTER = 8
MOST_TILES = 65535  # of tokens: CUDA's limit of a grid's second dimension
FEWEST_STAGES, USEFUL_STAGES = 2, 3

MULTIPROCESSOR_BYTES = 228 << 10  # of shared memory
BLOCK_MOST_BYTES = 227 << 10  # of a block's
SYSTEM_BYTES = 1 << 10  # of each block, taken by the system
SPARE_BYTES = 0  # left for blocks of the kernel in front, which may still run
REGISTERS = {8: 72, 16: 72, 32: 72, 64: 72, 128: 104, 256: 168}  # of a thread, by tokens, as ptxas says
STREAM_RESIDENT = {
    1: 4,
    2: 3,
    3: 2,
}  # by strips, what that kernel is compiled for up to 64 tokens; 1 otherwise
QUARTER_REGISTERS = 16384  # a multiprocessor has four of them, each with every fourth warp

# Of the model, as measured on an H200: bytes a microsecond and cycles a microsecond.
MEMORY_RATE, CACHE_RATE, CLOCK = 4.3e6, 6.0e6, 1500.0
ENOUGH = 90  # multiprocessors that together saturate the memory
START_US, SPLIT_US, STREAM_US = 2.0, 0.7, 0.7


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
    def shared_bytes(self) -> int:
        """The shared memory that a block may have."""
        return min(BLOCK_MOST_BYTES, (MULTIPROCESSOR_BYTES - SPARE_BYTES) // self.resident - SYSTEM_BYTES)


def parse(text: str) -> Config | None:
    """What ``str`` of a configuration wrote; None for anything else, or what no kernel was compiled for."""
    match = re.fullmatch(r"(split):(\d+)x(\d+)/(\d+)x(\d+)/(\d+)|(stream):(\d+)x(\d+)/(\d+)/(\d+)", text)
    if match is None:
        return None
    words = [word for word in match.groups() if word is not None]
    design, (strips, tokens, sharers, *rest) = words[0], [int(word) for word in words[1:]]
    splits, resident = rest if design == SPLIT else (1, rest[0])
    found = Config(design, strips, tokens, sharers, splits, resident)
    return found if allowed(found) else None


def allowed(config: Config) -> bool:
    """Whether a kernel was compiled for it and a block's shared memory holds what it needs."""
    tokens, strips = config.tokens, config.strips
    if not LEAST_STRIPS.get(tokens, 1) <= strips <= STRIPS.get(tokens, 0):
        return False
    if min(config.sharers, config.splits, config.resident) < 1 or tokens % (8 * config.sharers):
        return False
    return (
        config.sharers * config.splits <= MOST_IN_CLUSTER
        and _needed(config, FEWEST_STAGES) <= config.shared_bytes
    )


def _needed(config: Config, stages: int) -> int:
    """Shared memory of a block with so many stages: csrc/hopper/ has the layout."""
    tokens, rows = config.tokens, config.strips * STRIP
    ring = stages * (tokens * BLOCK + config.strips * BLOCK_BYTES + 16)
    if config.design == STREAM:  # outputs are staged beside the ring
        return ring + config.strips * tokens * (2 * STRIP + 16 + 4)
    return max(ring, tokens * (rows + 4) * 4) + (2 * rows + tokens) * 4


def fits(config: Config) -> bool:
    """Whether as many blocks as it says have the registers that they need, and stages to run well."""
    if _needed(config, USEFUL_STAGES) > config.shared_bytes:
        return False
    if config.design == STREAM:
        return config.resident <= (STREAM_RESIDENT.get(config.strips, 1) if config.tokens <= 64 else 1)
    warps = -(-config.resident * (4 * config.strips + 1) // 4)  # of one quarter
    return warps * 32 * REGISTERS[config.tokens] <= QUARTER_REGISTERS


def tile(m: int) -> int:
    """The fewest tokens of a block that hold ``m``, else the most there are."""
    return next((tokens for tokens in STRIPS if tokens >= m), max(STRIPS))


def candidates(n: int, k: int, m: int, multiprocessors: int, most: int) -> list[Config]:
    """Up to ``most`` configurations for weights [n, k] and ``m`` tokens, that of the least predicted time first."""
    found = [
        (predicted_us(config, n, k, m, multiprocessors), config)
        for config in _all(n, k, m)
        if config.resident == 1 or _count(config, n, m) > multiprocessors * (config.resident - 1)
    ]
    return [config for _, config in sorted(found)[:most]]


def _count(config: Config, n: int, m: int) -> float:
    """How many blocks there are; without a limit where their number is chosen."""
    across = -(-strips_of(n) // (config.strips * config.sharers)) * config.sharers
    return math.inf if config.design == STREAM else across * config.splits * -(-m // config.tokens)


def _all(n: int, k: int, m: int) -> Iterator[Config]:
    widest = tile(m)
    widths = [tokens for tokens in STRIPS if (widest if m <= 64 else widest // 4) <= tokens <= widest]
    blocks, strips = -(-k // BLOCK), strips_of(n)
    for tokens, sharers, resident in product(widths, SHARERS, RESIDENT):
        for height in range(LEAST_STRIPS.get(tokens, 1), STRIPS[tokens] + 1):
            if height > 1 and (height - 1) * sharers >= strips:
                continue  # nothing to do for a part of each block
            ways = [(SPLIT, splits) for splits in SPLITS if splits <= blocks]
            for design, splits in (*ways, (STREAM, 1)):
                config = Config(design, height, tokens, sharers, splits, resident)
                if allowed(config) and fits(config):
                    yield config


def predicted_us(config: Config, n: int, k: int, m: int, multiprocessors: int) -> float:
    """Microseconds: the longest of the times that memory, cache and tensor cores take, and what comes around it.

    The tensor cores take a cycle for two tokens, at least 8 cycles, to multiply a strip by 64 columns.
    """
    strips, blocks = strips_of(n), -(-k // BLOCK)
    across = -(-strips // (config.strips * config.sharers)) * config.sharers
    tiles = -(-m // config.tokens)
    slots = multiprocessors * config.resident
    of_tile = 2 * blocks * config.strips * max(config.tokens / 2, 8)  # cycles
    if config.design == STREAM:
        count, fill = slots, 1.0
        cycles = across * tiles * of_tile / multiprocessors
        around = STREAM_US
    else:
        count = across * tiles * config.splits
        fill = count / (-(-count // slots) * slots) if count > slots else 1.0
        cycles = -(-count // multiprocessors) * of_tile / config.splits
        around = SPLIT_US if config.splits > 1 else 0.0
    weight = strips * blocks * BLOCK_BYTES
    activations = across * tiles * blocks * BLOCK * min(config.tokens, m) / config.sharers
    partial = config.splits > 1 or config.design == STREAM
    sums = count * config.strips * STRIP * min(config.tokens, m) * 4 if partial else 0
    rate = min(1.0, min(count, multiprocessors) / ENOUGH) * fill
    memory = (weight + m * (blocks * BLOCK + 2 * n)) / MEMORY_RATE / rate
    cache = (weight * tiles + activations + sums) / CACHE_RATE / rate
    return max(memory, cache, cycles / CLOCK) + START_US + around
