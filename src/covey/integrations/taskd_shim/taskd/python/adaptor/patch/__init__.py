"""Importing this module lets covey run torchrun's workers."""

from covey.integrations.taskd.torchrun_patch import patch

patch()
