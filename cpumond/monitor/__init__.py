"""The job CPU monitor: pure functions from readings to decisions (semantics.md 1).

Section numbers in docstrings are those of semantics.md (docs/specification) where no other file is named."""
