"""What the product must say, seen from outside: bytes in, public answers out.

`truth/README.md` says how to add a case.
"""
