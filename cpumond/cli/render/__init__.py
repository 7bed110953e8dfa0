"""What several commands print or export: tables and pages."""
