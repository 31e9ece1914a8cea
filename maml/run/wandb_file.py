"""What a W&B run has kept on disk: the history in its ``run-….wandb`` file.

The library writes it as the run goes on, offline and online, and ``wandb sync`` sends it. After a
kill its end is missing, and perhaps half a record. The format is LevelDB's log: blocks of 32 KiB,
records with a checksum, divided where a block ends.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maml.errors import UserError

BLOCK, MAGIC = 32 * 1024, b":W&B"
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
_HEADER = struct.Struct("<IHB")


def history(path: Path) -> list[dict[str, Any]]:
    """Return the rows that were logged, as far as the file is whole.

    Raises:
        UserError: naming the file, if it is none of W&B's or cannot be read.
    """
    # Imported late: it is heavy.
    from wandb.proto import wandb_internal_pb2

    make: Any = vars(wandb_internal_pb2)["Record"]
    rows = []
    for content in _records(path):
        record = make()
        record.ParseFromString(content)
        if record.HasField("history"):
            rows.append(
                {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
            )
    return rows


def _records(path: Path) -> Iterator[bytes]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if not content.startswith(MAGIC):
        raise UserError(f"{path}: is no file of Weights & Biases")
    place, parts = 7, b""
    while True:
        left = BLOCK - place % BLOCK
        if left < _HEADER.size:
            place += left
        header = content[place : place + _HEADER.size]
        if len(header) < _HEADER.size:
            return
        checksum, length, kind = _HEADER.unpack(header)
        place += _HEADER.size
        part = content[place : place + length]
        # The end was never written, or not all of it.
        if kind not in (FULL, FIRST, MIDDLE, LAST) or len(part) < length:
            return
        if zlib.crc32(part, zlib.crc32(bytes([kind]))) != checksum:
            return
        place += length
        parts = part if kind in (FULL, FIRST) else parts + part
        if kind in (FULL, LAST):
            yield parts
