"""The parts of the text that names a configuration of the Hopper kernels."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Configuration:
    """The name as csrc/hopper/configuration.cuh writes it."""

    design: str  # "split" or "stream"
    strips: int
    tokens: int
    multicast: int
    splits: int
    resident: int

    @classmethod
    def parse(cls, text: str) -> Configuration:
        """The configuration that ``text`` names."""
        found = re.fullmatch(r"(split|stream):(\d+)x(\d+)/(\d+)(?:x(\d+))?/(\d+)", text)
        assert found, text
        return cls(found[1], *(int(one or 1) for one in found.groups()[1:]))

    def __str__(self) -> str:
        splits = f"x{self.splits}" if self.design == "split" else ""
        return f"{self.design}:{self.strips}x{self.tokens}/{self.multicast}{splits}/{self.resident}"

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.multicast * self.splits
