"""What will be: the scheduler's own state, run ahead of time."""
