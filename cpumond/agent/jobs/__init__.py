"""The jobs that the scheduler orders: their files, their start, and their end."""
