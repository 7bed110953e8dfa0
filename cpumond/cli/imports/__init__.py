"""Convert configurations of other schedulers to tree files: ``tree import``."""
