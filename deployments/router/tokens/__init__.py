"""Who may call, and how much: bearer tokens, known by their SHA-256 alone.

entries.py (the file) → keyring.py (what is in force) → guard.py (who calls) → quota.py (how much is left)
"""
