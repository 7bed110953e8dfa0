"""Measures the CPU that jobs really use, moves their cgroup limits to it, and reports what is free."""

__version__ = "0.2.0"
