"""The agent of a node, which does one tick in each check_period. Read ``tick.py`` first."""
