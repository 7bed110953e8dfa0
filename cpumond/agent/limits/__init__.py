"""Limits as they are written: who wrote one, what is written next, what is put back."""
