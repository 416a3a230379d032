"""SGLang's launch arguments: how they are printed, spelled and defaulted, and which values a release refuses. Pure; imports only `sglang`."""
