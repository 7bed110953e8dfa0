"""The floor of all parts: errors, measures, settings, the protocol between node and scheduler; knows no other part."""
