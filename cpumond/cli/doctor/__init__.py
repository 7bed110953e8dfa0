"""``cpumond doctor``: what this host offers and what to do about what is missing."""
