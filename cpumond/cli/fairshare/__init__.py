"""``cpumond fair-share``: shares of a pool tree without a scheduler."""
