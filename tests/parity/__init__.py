"""Parity with transformers, family by family: the pixels, the tower, and the way from a picture's bytes to its vector.

    python -m tests.parity --quick                  # small models, eight pictures, every runner: seconds
    python -m tests.parity --family clip            # models of real size, 64 pictures; writes docs/parity.md and .json

A family is one entry in a list of cases (`cases.py` says what an entry holds); `registry.py` names the lists.
"""
