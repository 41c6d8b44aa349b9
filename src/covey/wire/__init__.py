"""Bytes ↔ messages: `frames`, the `greeting` before them, and the `link` over TCP that carries both, found by its `address`.
`callers` is the port of a rank or a parameter server, for whoever shows its token. With TLS, `tls` makes contexts from what
`credentials` reads, and `certificates` is a small authority of one's own.

Not here: what a message means. That is decided in `covey.core`.
"""
