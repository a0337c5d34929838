"""Measures a device profile: direct reads, the compute times of a package's shape, and what each costs the other."""

from estream.calibrate.run import calibrate

__all__ = ["calibrate"]
