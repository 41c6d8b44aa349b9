"""Warnings about output that is lost with its pod: relative paths in a command or environment, outside every mount.

The paths are guessed from the names of options and variables, and from redirections.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# Options whose name suggests an output path.
_OUTPUT_OPTION = re.compile(
    r"--?(?P<flag>[\w-]*(?:output|out_dir|out-dir|ckpt|checkpoint|save|log_dir|log-dir)[\w-]*)[= ]+(?P<path>[^\s\"';&|]+)",
    re.IGNORECASE,
)
_OUTPUT_REDIRECT = re.compile(r"(?:^|\s|\d|&)>{1,2}\s*(?P<path>[^\s\"';&|>]+)")
_CHANGE_DIRECTORY = re.compile(r"(?:^|[;&|\s])cd\s+(?P<path>/[^\s;&|]*)")
_OUTPUT_VARIABLES = ("GLOG_log_dir", "MS_RECOVERY_PATH", "OUTPUT_PATH", "CKPT_PATH")
PATH_CHARS_MAX = 60


def output_path_remarks(key: str, template: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each relative output path of the role `key` if the container's directory is not on a mount.

    The directory is that of the last `cd` with an absolute path in the command, otherwise workingDir, otherwise "/".
    """
    for container in template.get("spec", {}).get("containers") or []:
        mounts = [str(mount.get("mountPath", "")) for mount in container.get("volumeMounts") or []]
        command_line = " ".join(str(word) for word in [*(container.get("command") or []), *(container.get("args") or [])])
        directories = [match["path"] for match in _CHANGE_DIRECTORY.finditer(command_line)]
        directory = directories[-1] if directories else str(container.get("workingDir") or "/")
        if any(_is_inside(directory, mount) for mount in mounts):
            continue
        for path in _find_relative_outputs(command_line, container):
            yield (
                f"{key} writes to {path[:PATH_CHARS_MAX]}, which is in {directory} of the container and not on a volume, so "
                "it is lost with the pod: use an absolute path on a mount, or set workingDir"
            )


def _find_relative_outputs(command_line: str, container: Mapping[str, Any]) -> list[str]:
    found = [match["path"] for match in _OUTPUT_OPTION.finditer(command_line)]
    found += [match["path"] for match in _OUTPUT_REDIRECT.finditer(command_line)]
    found += [str(e.get("value", "")) for e in container.get("env") or [] if e.get("name") in _OUTPUT_VARIABLES]
    return [path for path in dict.fromkeys(found) if path and path[0] not in "/$-" and not path.isdigit()]


def _is_inside(path: str, mount: str) -> bool:
    return bool(mount) and (path == mount or path.startswith(mount.rstrip("/") + "/"))
