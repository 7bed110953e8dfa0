"""Trees and pools as they are configured: values, attributes, commands, rules; pure (semantics.md 0.2, 2)."""
