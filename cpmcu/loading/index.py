"""Index of a sharded checkpoint: tensor name -> file."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cpmcu.checks import brief, one_line, shown

logger = logging.getLogger(__name__)

Entry = TypeVar("Entry")

_MAX_LISTED = 8
_POINTER, _MAX_POINTER = b"version https://git-lfs.github.com/spec/", 1024  # bytes
_MAX_JSON = 256 << 20  # bytes; the largest tokenizer.json files have 40 MiB
_MAX_NAME = 255  # maximum length of a file name in bytes, in common file systems


def read_index(path: Path, read_shard: Callable[[Path], Mapping[str, Entry]]) -> dict[str, Entry]:
    """All tensors of the index, shard by shard.

    Raises ValueError for a damaged index and for a tensor that is not in its shard. Raises
    FileNotFoundError for a missing shard. Tensors of shards that are not in the index are logged.
    """
    weight_map = read_json(path, unique=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: weight_map is {shown(weight_map)}, expected tensor -> file")
    names_by_shard: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if not _is_file_name(shard):
            raise ValueError(
                f"{path}: {brief(name)} is in {shown(shard)}, expected the name of a file "
                "beside the index"
            )
        names_by_shard.setdefault(shard, []).append(name)
    missing = [shard for shard in sorted(names_by_shard) if not (path.parent / shard).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{path}: {len(missing)} of {len(names_by_shard)} files are missing: "
            f"{', '.join(missing)}, expected them in {path.parent}"
        )
    tensors: dict[str, Entry] = {}
    for shard, names in sorted(names_by_shard.items()):
        found = read_shard(path.parent / shard)
        for name in names:
            if name not in found:
                raise ValueError(f"{path}: {brief(name)} is not in {shard}, expected it there")
        # In the shard's order, which is the byte order in the file.
        tensors.update((name, found[name]) for name in found if weight_map.get(name) == shard)
        unlisted = [name for name in found if name not in weight_map]
        if unlisted:
            shown_names = ", ".join(map(brief, unlisted[:_MAX_LISTED]))
            logger.warning(
                "%s: %d ignored, not in the index: %s", shard, len(unlisted), shown_names
            )
    return tensors


def _is_file_name(value: Any) -> bool:
    """Is the value a valid name of a file in this directory?"""
    if not isinstance(value, str) or not value or Path(value).name != value:
        return False
    return value.isprintable() and len(value.encode("utf-8", "replace")) <= _MAX_NAME


def read_json(path: Path, *, unique: bool = False) -> dict[str, Any]:
    """A JSON object from a file. Raises FileNotFoundError, or ValueError for other content.

    `unique`: also raises ValueError if an object has the same name twice.
    """
    check = unique_names(str(path)) if unique else None
    check_file(path)
    if (size := path.stat().st_size) > _MAX_JSON:
        raise ValueError(f"{path}: has {size} bytes, expected JSON of at most {_MAX_JSON}")
    text = path.read_bytes()
    try:
        value = json.loads(text, object_pairs_hook=check)
    except DuplicateNameError:
        raise
    except (ValueError, RecursionError) as error:  # also for numbers of thousands of digits
        raise ValueError(f"{path}: is not JSON ({one_line(error)}), expected an object") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is a JSON {type(value).__name__}, expected an object")
    return value


class DuplicateNameError(ValueError):
    """A JSON object has the same name twice."""


def unique_names(where: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """An `object_pairs_hook` that raises DuplicateNameError for a repeated name."""

    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise DuplicateNameError(f"{where} has {shown(twice)} twice, expected each name once")
        return made

    return check


def _refuse_pointer(path: Path) -> None:
    if path.stat().st_size > _MAX_POINTER:
        return
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(
                f"{path}: is a pointer of Git LFS, expected the file that it stands for; run "
                "`git lfs pull` in its repository, or download the file"
            )


def check_file(path: Path) -> None:
    """Raises FileNotFoundError if `path` is missing, ValueError if it is not a regular file.

    A pointer file of Git LFS, which stands for a file that was not fetched, is a ValueError, too.
    """
    if path.is_file():
        _refuse_pointer(path)
        return
    if path.exists():
        what = "a directory" if path.is_dir() else "a device or pipe"
        raise ValueError(f"{path}: is {what}, expected a file")
    link = f"a link to {os.readlink(path)}, which is " if path.is_symlink() else ""
    raise FileNotFoundError(f"{path}: is {link}missing, expected a file")
