"""The exporter's advice tested on a real engine: a wrong setting, its notification, the advised command line, and the
effect.
"""
