"""Trials: the state itself, run on a copy for some rounds or over time, with and without changes (semantics.md 7)."""
