"""``cpumond doctor``: the abilities of this host, and advice about missing ones."""
