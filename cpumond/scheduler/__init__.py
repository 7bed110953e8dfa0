"""The scheduler: pool trees, admission, fair share over time, preemption, placement (semantics.md 2 to 9)."""
