"""The verbs of `covey`, and how options become settings. Nobody imports this room."""
