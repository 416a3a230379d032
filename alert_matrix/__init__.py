"""Every alert under every scraper: what fires, when, and what no rule can do anything about. For developers: `make test-rules`."""
