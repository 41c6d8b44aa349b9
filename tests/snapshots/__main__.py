"""Write the snapshots: `python -m tests.snapshots`, or `make snapshots`. Review the change as a diff."""

from __future__ import annotations

from tests.snapshots.collect import FOLDER, snapshots

for name, text in snapshots().items():
    (FOLDER / name).write_text(text)
