"""Inside a training process: the loop, its data and state, the group and its collectives. The only room that imports torch, and
only when used."""
