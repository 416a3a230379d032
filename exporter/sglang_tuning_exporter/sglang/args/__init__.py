"""SGLang's launch arguments: how they are printed, spelled and defaulted, and which values a release rejects. Pure; imports only `sglang`."""
