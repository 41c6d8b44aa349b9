"""All of TaskD's calls."""

from covey.taskd import *  # noqa: F403
