"""The safetensors reader: valid files, and one sentence for each kind of damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmcu.loading.checkpoint import open_checkpoint
from cpmcu.loading.safetensors import open_safetensors, read_header
from tests.reference.tiny_checkpoints import from_bits, to_bits, write_safetensors, write_tiny

DTYPES = {"F32": np.float32, "F16": np.float16, "I32": np.int32, "U8": np.uint8, "I64": np.int64}


def write(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = (len(text) if length is None else length).to_bytes(8, "little")
    path.write_bytes(prefix + text + data)
    return path


def entry(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def complaint(path: Path) -> str:
    with pytest.raises(ValueError) as error:
        read_header(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message


# ---- reading


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(DTYPES)),
            st.lists(st.integers(0, 5), max_size=3),
            st.text(min_size=1, max_size=12),
        ),
        max_size=6,
        unique_by=lambda item: item[2],
    ),
    st.integers(0, 2**32 - 1),
)
def test_reads_what_the_library_writes(
    tmp_path_factory: pytest.TempPathFactory, specs: list[tuple[str, list[int], str]], seed: int
) -> None:
    safetensors = pytest.importorskip("safetensors.numpy", reason="needs the safetensors library")
    rng = np.random.default_rng(seed)
    arrays = {
        name: rng.integers(0, 100, shape).astype(DTYPES[code])
        for code, shape, name in specs
        if name != "__metadata__"
    }
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    safetensors.save_file(arrays, path)
    checkpoint = open_safetensors(path)
    assert set(checkpoint.tensors) == set(arrays)
    for name, array in arrays.items():
        found = checkpoint.read(name)
        assert found.dtype == array.dtype and found.shape == array.shape
        np.testing.assert_array_equal(found, array)
        stored = checkpoint.tensors[name]
        assert stored.offset is not None and stored.meta.nbytes == array.nbytes


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_a_value_error(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    path.write_bytes(noise)
    try:
        read_header(path)
    except ValueError as error:
        assert str(path) in str(error)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_one_wrong_byte_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    write_safetensors(path, {"a": np.ones((3, 4), np.float32), "b": np.ones(5, np.float32)})
    content = bytearray(path.read_bytes())
    content[position % len(content)] = value
    path.write_bytes(content)
    try:
        tensors = read_header(path)
    except ValueError as error:
        assert str(path) in str(error)
    else:
        for stored in tensors.values():
            assert stored.offset is not None
            assert 8 <= stored.offset <= stored.offset + stored.meta.nbytes <= len(content)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_every_truncation_is_refused(
    tmp_path_factory: pytest.TempPathFactory, position: int
) -> None:
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    write_safetensors(path, {"a": np.ones((3, 4), np.float32), "b": np.ones(5, np.float32)})
    content = path.read_bytes()
    path.write_bytes(content[: position % len(content)])
    assert "truncated" in complaint(path) or path.stat().st_size < 8


def test_bfloat16_is_read_as_bits(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 3.1415926, 1e-20], np.float32)
    write_safetensors(tmp_path / "model.safetensors", {"a": values}, "bfloat16")
    found = open_safetensors(tmp_path / "model.safetensors").read("a")
    np.testing.assert_array_equal(found, to_bits(values, "bfloat16"))
    np.testing.assert_allclose(from_bits(found, "bfloat16"), values, rtol=2**-8)


def test_tensors_are_in_byte_order(tmp_path: Path) -> None:
    header = {"b": entry(8, 12, [1]), "a": entry(0, 8, [2]), "empty": entry(8, 8, [0, 7])}
    path = write(tmp_path / "x.safetensors", header, bytes(12))
    assert list(read_header(path)) == ["a", "empty", "b"]


# ---- damage


def test_too_short_for_a_header_length(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\x01\x00")
    assert "is 2 bytes long, expected at least 8" in complaint(path)


def test_excessive_header_length(tmp_path: Path) -> None:
    message = complaint(write(tmp_path / "x.safetensors", {}, length=2**63))
    assert "9223372036854775808" in message and "at most 100000000" in message


def test_header_beyond_the_file(tmp_path: Path) -> None:
    message = complaint(write(tmp_path / "x.safetensors", b"{}", length=1000))
    assert "1000 bytes but 2 bytes follow" in message and "truncated" in message


@pytest.mark.parametrize("header", [b"[1]", b'"x"', b"{]", b"\xff\xfe", b"[" * 100_000])
def test_header_is_not_an_object(tmp_path: Path, header: bytes) -> None:
    assert "expected an object" in complaint(write(tmp_path / "x.safetensors", header))


DAMAGED: list[tuple[dict[str, Any], int, list[str]]] = [
    ({"a": entry(0, 16, [4])}, 8, ["a ends at byte", "truncated"]),
    ({"a": entry(0, 16, [3])}, 16, ["a takes 16 bytes", "expected 12", "float32", "[3]"]),
    ({"a": entry(0, 8, [4], "Q9")}, 8, ["dtype of a is 'Q9'", "BF16"]),
    ({"a": entry(0, 8, [4], None)}, 8, ["dtype of a is None"]),  # type: ignore[arg-type]
    ({"a": entry(0, 16, [-4])}, 16, ["shape of a is [-4]"]),
    ({"a": entry(0, 16, [True, 4])}, 16, ["shape of a is [True, 4]"]),
    ({"a": entry(0, 16, "4")}, 16, ["shape of a is '4'"]),  # type: ignore[arg-type]
    ({"a": entry(16, 0, [4])}, 16, ["data_offsets of a is [16, 0]", "begin <= end"]),
    ({"a": entry(-16, 0, [4])}, 16, ["data_offsets of a is [-16, 0]"]),
    ({"a": {"dtype": "F32", "shape": [4]}}, 16, ["data_offsets of a is None"]),
    ({"a": 7}, 16, ["header of a is 7"]),
    ({"a": entry(0, 16, [4]), "b": entry(8, 24, [4])}, 24, ["b overlaps a", "expected 16"]),
    ({"a": entry(0, 16, [4]), "b": entry(20, 36, [4])}, 36, ["b leaves a hole after a"]),
    ({"a": entry(4, 20, [4])}, 20, ["a leaves a hole after the header"]),
    ({"a": entry(0, 16, [4])}, 20, ["4 bytes belong to no tensor"]),
    ({"a": entry(0, 16, [2**62, 2**62])}, 16, ["a takes 16 bytes"]),
]


@pytest.mark.parametrize(("header", "data_bytes", "words"), DAMAGED)
def test_damage(tmp_path: Path, header: Any, data_bytes: int, words: list[str]) -> None:
    message = complaint(write(tmp_path / "x.safetensors", header, bytes(data_bytes)))
    for word in words:
        assert word in message


def test_a_name_twice(tmp_path: Path) -> None:
    one = json.dumps(entry(0, 16, [4]))
    header = f'{{"a": {one}, "a": {one}}}'.encode()
    message = complaint(write(tmp_path / "x.safetensors", header, bytes(16)))
    assert "'a' twice" in message


# ---- index


def damage_index(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    index_path = path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    change(index)
    index_path.write_text(json.dumps(index))
    return index_path


def test_shards_are_read_through_the_index(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, shards=3)
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == set(tiny.weights)
    for name, array in tiny.weights.items():
        np.testing.assert_array_equal(checkpoint.read(name), array)
    assert len({stored.path for stored in checkpoint.tensors.values()}) == 3


def test_missing_shard(tmp_path: Path) -> None:
    write_tiny(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError) as error:
        open_checkpoint(tmp_path)
    assert "1 of 3 files are missing: model-00002-of-00003.safetensors" in str(error.value)


def test_tensor_missing_in_its_shard(tmp_path: Path) -> None:
    write_tiny(tmp_path, shards=2)

    def add(index: dict[str, Any]) -> None:
        index["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"

    damage_index(tmp_path, add)
    with pytest.raises(ValueError, match=r"ghost\.weight is not in model-00001-of-00002"):
        open_checkpoint(tmp_path)


def test_tensor_missing_in_the_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tiny(tmp_path, shards=2)
    damage_index(tmp_path, lambda index: index["weight_map"].pop("model.norm.weight"))
    assert "model.norm.weight" not in open_checkpoint(tmp_path).tensors
    assert "not in the index: model.norm.weight" in caplog.text


@pytest.mark.parametrize(
    "shard",
    ["../model.safetensors", "/etc/passwd", "", 7, None, "x" * 300, "a\0b", "a\nb", "\ud800"],
)
def test_index_that_leaves_the_directory(tmp_path: Path, shard: Any) -> None:
    write_tiny(tmp_path, shards=2)
    damage_index(tmp_path, lambda index: index["weight_map"].update(x=shard))
    with pytest.raises(ValueError, match="expected the name of a file beside the index"):
        open_checkpoint(tmp_path)


def test_a_name_twice_in_the_index(tmp_path: Path) -> None:
    write_tiny(tmp_path, shards=2)
    path = tmp_path / "model.safetensors.index.json"
    file = '"model-00001-of-00002.safetensors"'
    path.write_text(f'{{"weight_map": {{"a": {file}, "b": {file}, "a": {file}}}}}')
    with pytest.raises(ValueError, match=r"index.json has 'a' twice, expected each name once"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "any.bin"])
def test_paths_that_are_not_files(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/no/such/blob")
    with pytest.raises(FileNotFoundError, match=f"{name}: is a link to /no/such/blob, which is mi"):
        open_checkpoint(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"{name}: is a directory, expected a file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": []}', '{"weight_map": {}}', "{}"])
def test_damaged_index(tmp_path: Path, text: str) -> None:
    write_tiny(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json: .*expected"):
        open_checkpoint(tmp_path)
