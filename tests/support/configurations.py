"""A parser for the names of configurations of the Hopper kernels."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Configuration:
    """The fields of a configuration's name, as csrc/hopper/configuration.cuh formats it."""

    design: str  # "split" or "stream"
    strips: int
    tokens: int
    multicast: int
    splits: int
    resident: int

    @classmethod
    def parse(cls, text: str) -> Configuration:
        """Parse the name of a configuration."""
        match = re.fullmatch(r"(split|stream):(\d+)x(\d+)/(\d+)(?:x(\d+))?/(\d+)", text)
        assert match, text
        return cls(match[1], *(int(number or 1) for number in match.groups()[1:]))

    def __str__(self) -> str:
        splits = f"x{self.splits}" if self.design == "split" else ""
        return f"{self.design}:{self.strips}x{self.tokens}/{self.multicast}{splits}/{self.resident}"

    @property
    def cluster(self) -> int:
        """Number of CTAs in a cluster."""
        return self.multicast * self.splits
