"""Import of torch on first use, so that scripts without collectives and without training objects run without torch."""

from __future__ import annotations

import functools
from typing import Any

from covey.errors import UsageError


@functools.cache
def torch_module() -> Any:
    """Return torch, with `torch.distributed` imported; raise `UsageError` if an import fails."""
    try:
        import torch
        import torch.distributed
    except ImportError:
        raise UsageError("collectives need torch: pip install 'covey[torch]'") from None
    return torch
