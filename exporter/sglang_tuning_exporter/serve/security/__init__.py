"""Access control: Prometheus's web configuration file, TLS, passwords, and the headers of every answer; bounded work for strangers."""
