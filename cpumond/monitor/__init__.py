"""The job CPU monitor: pure functions from readings to decisions (semantics.md section 1)."""
