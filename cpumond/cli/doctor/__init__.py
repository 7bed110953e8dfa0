"""``cpumond doctor``: the capabilities of this host, and advice about missing ones."""
