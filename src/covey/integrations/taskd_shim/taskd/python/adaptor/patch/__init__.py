"""Importing this hands torchrun's workers to covey."""

from covey.integrations.taskd.torchrun_patch import patch

patch()
