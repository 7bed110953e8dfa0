"""Who asks, and what may be done: users, entries of access lists, tokens."""
