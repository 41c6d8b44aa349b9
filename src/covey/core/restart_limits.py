"""Restart limits: the meaning of `--max-restarts N`, and its defaults.

The option limits two counts:

* restarts of all workers together, as torchrun's option of that name. The default is `MAX_RESTARTS`. If the ranks cannot resume
  or rows of parameter servers are lost, further restarts are possible.
* replaced processes on one host, in scripts that call `covey.init()`. With N = 0, the default, the limit is `REPLACEMENTS_MAX`.

The scheduler has the option's value. An agent started with `--or-join` sends its own value too, and the lower one applies; an
agent's 0 is a limit of 0 for both counts. `NO_HOST_LIMIT` means that an agent has no value of its own.
"""

from __future__ import annotations

from typing import Final

MAX_RESTARTS: Final = 0
REPLACEMENTS_MAX: Final = 32767  # as MindSpore's max_restarts
TASKD_MAX_RESTARTS: Final = 32767  # value for both counts in jobs that TaskD starts without a limit
NO_HOST_LIMIT: Final = -1


def replacement_limit(max_restarts: int) -> int:
    """Return the limit of replaced processes per host for a value of --max-restarts: `REPLACEMENTS_MAX` for 0."""
    return max_restarts or REPLACEMENTS_MAX
