"""Bytes ↔ messages: framing, greeting, TLS, a link over TCP.

Not here: what a message means. That is decided in `covey.core`.
"""
