"""The agent: one tick per check_period. Read ``loop.py`` first."""
