"""The history: points taken from the state, kept in a file of their own, shown as graphs and reports."""
