"""SGLang's `/metrics` as figures, in each release's own names. Pure; imports only `sglang`."""
