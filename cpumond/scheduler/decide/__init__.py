"""Decisions on the living tree: admission, shares, starvation, preemption, placement; pure (semantics.md 2 to 9)."""
