"""Shared pieces of the benchmark scripts."""
