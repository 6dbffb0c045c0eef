"""`python -m soak`: random networks, faults, files, processes and threads against the library, for as long as you like.

A case is a category and a seed, which make it again: `python -m soak --reproduce networks:12345`. Every case runs in a
process of its own with a time limit, so a crash or a hang is a result like any other.
"""
