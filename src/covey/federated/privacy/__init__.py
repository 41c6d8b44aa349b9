"""What keeps a device's update its own: arithmetic on arrays and keys. No sockets, no clocks, no rounds.

    `ring`      whole numbers modulo 2^32, in which masks cancel exactly
    `masks`     keys between two devices, the masks that follow from them, shares only their receiver can read
    `session`   a device's side of a secure round, and the sum's
    `noise`     clipping, and what hides one device among many
    `identity`  who a device is, by certificate

Rounds and who may do what are in `covey.core.secure_round`; the wire is `covey.federated`'s.
"""
