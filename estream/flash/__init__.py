"""Bytes from flash into banks: the pool file, the prefetcher, and the stream that the engine's layer loop reads."""

from estream.flash.machine import MODES
from estream.flash.pool import PoolFile, Source
from estream.flash.ranges import load_ranges
from estream.flash.resident import ResidentExperts
from estream.flash.states import Counters, ReadyGroup
from estream.flash.stream import ExpertStream

__all__ = ["MODES", "Counters", "ExpertStream", "PoolFile", "ReadyGroup", "ResidentExperts", "Source", "load_ranges"]
