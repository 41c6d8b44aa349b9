"""Importing this hands torchrun's workers to covey."""

from covey.taskd.launcher import patch

patch()
