"""Data sources: follows the log, scrapes SGLang, keeps positions and counters across restarts.

Imports `core`, `config` and `sglang`.
"""
