"""The job CPU monitor: pure functions that make decisions from readings (semantics.md 1).

Section numbers in docstrings refer to semantics.md (docs/specification) if no other file is named."""
