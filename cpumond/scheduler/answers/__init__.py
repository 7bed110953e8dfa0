"""Explanations: why an operation has what it has, what a change of the configuration would do (semantics.md 2 to 7)."""
