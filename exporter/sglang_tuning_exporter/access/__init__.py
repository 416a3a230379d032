"""Who may come in: Prometheus's web configuration file, TLS, passwords, and what every answer carries."""
