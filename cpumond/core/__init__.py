"""Base layer of all parts: errors, measures, settings, the node-scheduler protocol. It imports no other part."""
