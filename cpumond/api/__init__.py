"""What the scheduler serves over HTTP."""
