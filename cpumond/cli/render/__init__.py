"""Output shared by several commands: tables and pages."""
