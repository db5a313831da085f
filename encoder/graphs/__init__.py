"""Forwards that are made ready before the first request: eager ones, and graphs captured per bucket."""
