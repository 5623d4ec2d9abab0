"""The small file that says which copy of each record is whole: replaced last, in one act.

Knows no bytes of records, only their slots and checksums.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lite.errors import StoreError
from grpo_lite.offload.disk_files import FileIO

NAME = "manifest.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One whole copy of a record."""

    slot: int
    """Which of the record's slots holds it."""
    digest: str
    """xxh3 of its bytes, in hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One generation: a whole copy of every record, and what the owner wants to know of it."""

    fingerprint: str
    """Of the layout that the records belong to."""
    meta: dict[str, Any]
    """The owner's: completed steps, learning rates."""
    copies: dict[int, Copy]
    """By record key."""


def write_manifest(folder: Path, manifest: Manifest, io: FileIO, *, durable: bool) -> None:
    """Replace the manifest of `folder`; `durable` also survives a power cut.

    Raises:
        OSError: it could not be written; the old manifest is whole and in its place.
    """
    text = json.dumps(
        {
            "schema": SCHEMA,
            "fingerprint": manifest.fingerprint,
            "meta": manifest.meta,
            "copies": {key: [copy.slot, copy.digest] for key, copy in manifest.copies.items()},
        }
    )
    new = folder / (NAME + ".new")
    fd = io.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        data = memoryview(text.encode())
        while data:
            data = data[io.pwrite(fd, data, len(text.encode()) - len(data)) :]
        if durable:
            io.fsync(fd)
    finally:
        os.close(fd)
    io.replace(new, folder / NAME)
    if durable:
        folder_fd = io.open(folder, os.O_RDONLY)
        try:
            io.fsync(folder_fd)
        finally:
            os.close(folder_fd)


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of `folder`; None where there is none.

    Raises:
        StoreError: it is there and cannot be understood.
    """
    path = folder / NAME
    try:
        record = json.loads(path.read_text())
        if record["schema"] != SCHEMA:
            raise StoreError(
                f"{path} has schema {record['schema']}; this version reads {SCHEMA}",
                hint="start without resume=True, from a saved state_dict",
            )
        return Manifest(
            fingerprint=record["fingerprint"],
            meta=record["meta"],
            copies={
                int(key): Copy(slot=slot, digest=digest)
                for key, (slot, digest) in record["copies"].items()
            },
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{path} is not a manifest of grpo-lite: {error!r}",
            hint="start without resume=True, from a saved state_dict",
        ) from error
