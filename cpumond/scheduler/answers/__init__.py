"""Explanations: why an operation has what it has, and what a configuration change would do (semantics.md 2 to 7)."""
