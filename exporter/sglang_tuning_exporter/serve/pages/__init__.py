"""The exporter's own pages for people. Imports `collect` and what lies below."""
