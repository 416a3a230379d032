"""`backfill` and `plan`: a log of last night in, its metrics or its table of loads out.

It may import every room but `cli`, `recordings` and `mixin`.
"""
