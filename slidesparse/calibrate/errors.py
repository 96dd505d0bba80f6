"""What can go wrong in calibration.  Standard library only."""

from __future__ import annotations


class CalibrationError(ValueError):
    """Calibration that cannot be done: the data, the model or the options do not do."""


class MissingPackageError(RuntimeError):
    """Something that calibration needs is not installed, or not on this machine."""
