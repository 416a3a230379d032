"""A server read from its log and judged. Pure.

`lines` reads SGLang's lines, `server` is the state over time, `diagnoses` and `judge` give the verdict, `advice` the
changes.
"""
