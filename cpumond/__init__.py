"""Measures the CPU that jobs really use, adapts their cgroup limits to it, and reports the free CPU."""

__version__ = "0.2.0"
