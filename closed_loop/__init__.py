"""The advice proven on a real engine: a wrong setting, its notification, the advised command line, and what it changed."""
