"""The running exporter: its HTTP application, metrics, pages and access control. Imports `collect` and what lies below."""
