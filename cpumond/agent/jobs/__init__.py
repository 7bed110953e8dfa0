"""The jobs that the scheduler starts on this node: their files, their start, and their end."""
