"""The conditions of diagnoses, by what they are about.

May import `state`, `sglang/` and, of `diagnosis/`, evidence, interruption, profile settings, PromQL and suspects; no
rows.
"""
