"""Recorded servers: make one, remove private data from it, replay it, and run the whole chain on it. May import every room but the command line."""
