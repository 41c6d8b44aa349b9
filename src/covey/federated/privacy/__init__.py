"""Keys, masks and noise: cryptography and arithmetic on arrays, without sockets or clocks.

    `fixed_point_ring`      integers modulo 2^32, in which masks cancel exactly
    `secagg_crypto`         keys between two devices, masks derived from them, sealed shares
    `secagg_device_state`   a device's side of a secure round, and the unmasking of a sum
    `dp_noise`              clipping and Gaussian noise
    `device_certificates`   device certificates and signatures (`identity` is its deprecated name)

The protocol's decisions are in `covey.core.federated.secagg`.
"""
