"""Doors: how programs written for other frameworks come to be trained or started here: `lightning`, `accelerate`, `mindspore`.
Each imports its framework; nobody inside walks through them.
"""
