"""The agent of a node: one tick per check_period. Read ``tick.py`` first."""
