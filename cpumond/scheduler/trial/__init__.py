"""Trials: the state itself run on a copy, for some rounds or over time, with changes and without (semantics.md 7)."""
