"""Connections between processes, and the conversion of messages to bytes.

`address`                host and port; the process that owns a port in use
`framing`                length-prefixed frames
`handshake`              first lines of a connection: protocol version, proof of the join secret
`connection`             a connection with handshake and frames, over TCP or a Unix socket
`authenticated_server`   a TCP server with a thread per client, which requires a token
`tls`                    TLS contexts, and explained handshake errors
`tls_files`              certificates and keys on disk
`local_ca`               a certificate authority for `covey tls`
"""
