"""All of TaskD's calls."""

from covey.integrations.taskd import *  # noqa: F403
