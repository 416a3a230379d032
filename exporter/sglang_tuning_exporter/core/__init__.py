"""A server read from its log and judged: `lines` (what SGLang prints), `server` (its state over time), `rows` and `judge` (the verdict), `advice`. Pure."""
