"""`report`, `backfill` and `plan`: a log of last night in, what limited the server and what to change out.

It may import every room but `cli`, `recordings` and `mixin`.
"""
