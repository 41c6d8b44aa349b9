"""Importing this module in torchrun lets covey run its workers (`covey.integrations.taskd.torchrun_patch`)."""

from covey.integrations.taskd.torchrun_patch import patch

patch()
