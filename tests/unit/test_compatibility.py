"""Versions in docs/compatibility.md match the code."""

from __future__ import annotations

import re

import msgspec
from tests.documents import ROOT

from covey.cli.run.event_hooks import HookEvent
from covey.core.messages import PROTOCOL
from covey.core.msjob import spec
from covey.federated.server import update_log
from covey.parameter_server import checkpoint_files as row_files
from covey.storage import journal
from covey.training.checkpoint import files

SECTION = re.compile(r"^\| what \| version \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)


def test_versions_in_document_match_code() -> None:
    found = SECTION.search((ROOT / "docs/compatibility.md").read_text())
    assert found is not None
    written = {cells[1]: cells[2] for cells in ([cell.strip() for cell in line.split("|")] for line in found[1].splitlines())}
    schema = next(field.default for field in msgspec.structs.fields(HookEvent) if field.name == "schema")
    assert written == {
        "wire protocol, between all processes of a cluster": str(PROTOCOL),
        "journal of a scheduler": str(journal.FORMAT),
        "checkpoint of `covey.Loop`": str(files.FORMAT_VERSION),
        "rows of parameter servers in a checkpoint": str(row_files.FORMAT),
        "update log of a federated server": update_log._RECORD_MAGIC.decode(),
        "record and models of a federated cluster": "none",
        "`MSJob`, custom resource": spec.API_VERSION,
        "document of `--on-event`": str(schema),
    }
