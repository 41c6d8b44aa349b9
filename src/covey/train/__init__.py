"""Inside a training process: the group and its collectives. The only room that imports torch, and only when used."""
