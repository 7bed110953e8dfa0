"""The history: points taken from the state, kept in their own file, shown as graphs and reports."""
