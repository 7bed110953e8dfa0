"""Write limits: find out who wrote a limit, choose what to write next, and restore originals."""
