"""Many devices in one process.

`simulator`          trains simulated devices against a real or in-process federation
`privacy_pipeline`   compression, noise and masks in a simulation
"""
