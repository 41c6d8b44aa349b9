"""All of TaskD's calls, implemented by `covey.integrations.taskd`."""

from covey.integrations.taskd import *  # noqa: F403
