"""The scheduler: pool trees, admission, fair share over time, preemption, placement (semantics.md 2 to 9).

Section numbers in docstrings are those of semantics.md (docs/specification) where no other file is named."""
