"""What every part may use: errors, measures, settings, the protocol between node and scheduler; knows no other part."""
