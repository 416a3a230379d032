"""The HTTP face: /metrics, the health endpoints and a page for people."""
