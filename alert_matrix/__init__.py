"""Every alert under every scraper: what fires, when, and what no rule can handle. For developers: `make test-rules`."""
