"""SGLang's log lines as events: what surrounds a line, its prefix, and its own words. Pure; imports only `sglang`."""
