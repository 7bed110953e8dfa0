"""The agent: one tick per check_period. Read ``tick.py`` first."""
