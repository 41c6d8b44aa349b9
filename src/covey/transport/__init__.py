"""Bytes to messages and back. The meaning of a message is decided in `covey.core`.

`address`        host and port; who owns a port that is taken
`framing`        length-prefixed frames
`handshake`      first lines of a connection: version, cluster, join secret
`connection`     a TCP connection that carries both
`token_server`   threaded port of a rank or a parameter server, which requires a token
`tls`            TLS contexts, and explained handshake errors
`tls_files`      certificates and keys on disk
`local_ca`       a certificate authority for `covey tls`
"""
