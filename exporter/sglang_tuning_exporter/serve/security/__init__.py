"""Access control: Prometheus's web configuration file, TLS, passwords, and the headers of every answer. Imports only `config`."""
