"""What SGLang prints and exposes, in every release from 0.3.0 to 0.5.23: text in, objects out.

Pure; imports no other room.
"""
