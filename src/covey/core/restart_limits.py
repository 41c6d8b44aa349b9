"""Restart limits: the meaning of `max_restarts`, and its defaults.

`--max-restarts N` limits two counts, which messages and records carry as plain numbers:

* restarts of all workers together, as torchrun's option of that name. The default is `MAX_RESTARTS`.
* replacements of single workers on one host, in scripts that call `covey.init()`. The default is `REPLACEMENTS_MAX`; a
  value of 0 stands for it.

An agent that joins a scheduler which was started without the option sends its own value, and the lower one applies.
`NO_HOST_LIMIT` means that the agent has no value of its own.
"""

from __future__ import annotations

from typing import Final

MAX_RESTARTS: Final = 0
REPLACEMENTS_MAX: Final = 32767  # as MindSpore's max_restarts
TASKD_MAX_RESTARTS: Final = 32767  # default of TaskD's max_restarts, which limits both counts
NO_HOST_LIMIT: Final = -1


def replacement_limit(max_restarts: int) -> int:
    """Return the limit of replacements per host that follows from --max-restarts."""
    return max_restarts or REPLACEMENTS_MAX
