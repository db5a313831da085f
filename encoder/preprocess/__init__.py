"""Bytes to pixels (`decode`), pixels to the model's input (`transform`), text to tokens (`text`).

Nothing is imported here: `decode` needs no torch, and those who only decode should not pay for it.
"""
