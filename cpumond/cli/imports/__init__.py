"""Configurations of other schedulers as tree files: ``tree import``."""
