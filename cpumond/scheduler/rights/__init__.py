"""Users, entries of access lists, tokens."""
