"""Trials: a copy of the state is run, for some rounds or over time, with and without changes (semantics.md 7)."""
