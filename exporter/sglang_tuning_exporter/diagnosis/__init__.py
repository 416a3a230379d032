"""What SGLang's tuning guide says: diagnoses, the evidence for each, and the flag to change. Pure; imports `state` and `sglang`."""
