"""Simulation of many devices in one process.

`simulator`          trains simulated devices and aggregates their updates, without sockets
`privacy_pipeline`   compression, noise and masks in a simulation
"""
