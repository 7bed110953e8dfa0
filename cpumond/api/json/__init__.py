"""The JSON interface `/api/v1`."""
