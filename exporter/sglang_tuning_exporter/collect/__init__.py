"""Data sources: follows the log, scrapes SGLang, keeps positions and counters across restarts.

Imports `config`, `diagnosis` and what lies below.
"""
