"""Doors: how programs written for other frameworks come to be trained by our loop. Each imports its framework; nobody inside
walks through them."""
