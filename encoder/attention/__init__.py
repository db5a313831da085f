"""Attention: one resolved backend a replica, a declared fallback, and no mask ever dropped."""
