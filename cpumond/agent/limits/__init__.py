"""Writing limits: who wrote one, what to write next, and how to restore originals."""
