"""The configuration of trees and pools: values, attributes, commands, rules; pure (semantics.md 0.2, 2)."""
