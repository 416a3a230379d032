"""A sidecar that watches an SGLang server, says what limits it, and names the flag to change."""

__version__ = "0.1.0"
