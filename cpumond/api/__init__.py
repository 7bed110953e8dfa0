"""The scheduler's HTTP interface."""
