"""Writes new schema versions from changed record classes. A released file is never touched."""

from __future__ import annotations

import json
from pathlib import Path

from rollstream.schemas.codec import CLASSES
from rollstream.schemas.derive import derive_schema


def write_changed(folder: Path) -> list[str]:
    """Write `<record>.v<N+1>.avsc` for every record whose class differs from its newest file in `folder`.

    Returns: names of the files written.
    """
    written = []
    for name, cls in CLASSES.items():
        versions = sorted(int(file.name.split(".v")[1].split(".")[0]) for file in folder.glob(f"{name}.v*.avsc"))
        schema = derive_schema(cls)
        if versions and json.loads((folder / f"{name}.v{versions[-1]}.avsc").read_text("utf-8")) == schema:
            continue
        file = folder / f"{name}.v{versions[-1] + 1 if versions else 1}.avsc"
        file.write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n", "utf-8")
        written.append(file.name)
    return written
