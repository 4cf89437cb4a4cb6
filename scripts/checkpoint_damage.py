"""Valid tiny checkpoints and recipes that damage them, for scripts/fuzz_checkpoints.py.

A recipe is a number. It seeds the choice of a checkpoint and of one to three damages to its files.
The same number always makes the same directory.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]

from tokenizers_for_tests import byte_fallback, byte_level, write_directory  # noqa: E402

from tests.reference.tiny_checkpoints import random_weights, tiny_config, write_tiny  # noqa: E402
from tests.reference.tiny_drafts import write_draft  # noqa: E402
from tests.reference.tiny_w4 import LAYOUTS, SIZES, quantise, write_w4  # noqa: E402

Json = Any
Damage = Callable[[random.Random, Path], None]

DRAFT = "draft"  # name of the draft's folder within a checkpoint's folder
TARGET = "target"
TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content "
    "+ '<|im_end|>\\n' }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


# ---- valid checkpoints


def write_bases(root: Path) -> list[Path]:
    """Writes folders with a target each. Some also have a draft."""
    vocab = byte_level().get_vocab_size()
    made: list[Path] = []

    def new(name: str) -> Path:
        made.append(root / name)
        return made[-1] / TARGET

    for name, family, draft, settings in (
        ("llama", "llama", "eagle", {}),
        ("llama3", "llama", "eagle3", {"num_hidden_layers": 3, "dtype": "bfloat16"}),
        ("qwen2", "qwen2", "model", {"shards": 2, "dtype": "float16"}),
        ("minicpm", "minicpm", "minicpm_eagle", {}),
        ("qwen3", "qwen3", "", {"tie_word_embeddings": True}),
        ("qwen3_5", "qwen3_5", "", {"mtp_num_hidden_layers": 1, "dtype": "bfloat16"}),
    ):
        target = write_tiny(new(name), family, vocab_size=vocab, **settings)
        _write_texts(target.directory, byte_fallback() if name == "minicpm" else byte_level())
        if draft:
            write_draft(made[-1] / DRAFT, draft, target)
        if name == "minicpm":
            counts = np.random.default_rng(0).integers(0, 1000, vocab)
            np.save(made[-1] / DRAFT / "token_counts.npy", counts)
    small = {**SIZES, "vocab_size": vocab, "num_hidden_layers": 1}
    config = tiny_config("llama", **small)
    weights = quantise(random_weights(config))
    for layout in LAYOUTS:
        write_w4(new(layout), config, weights, layout)
        _write_texts(made[-1] / TARGET, byte_level())
    return made


def _write_texts(directory: Path, tokenizer: Any) -> None:
    """Writes all text files of a checkpoint: tokenizer, template, generation config."""
    added = {
        str(tokenizer.token_to_id(token)): {"content": token, "special": True, "lstrip": False}
        for token in ("<s>", "</s>", "<|im_start|>")
    }
    write_directory(
        directory,
        tokenizer,
        add_bos_token=True,
        added_tokens_decoder=added,
        additional_special_tokens=["<|im_end|>"],
        chat_template=TEMPLATE,
        model_max_length=512,
    )
    sampling = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "do_sample": True}
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], **sampling}))
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    (directory / "added_tokens.json").write_text("{}")
    folder = directory / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text(TEMPLATE)


# ---- recipes


def damage(number: int, bases: list[Path], directory: Path) -> list[str]:
    """Writes the damaged checkpoint of a recipe to `directory`. Returns a list of the damages."""
    rng = random.Random(number)
    base = rng.choice(bases)
    shutil.copytree(base, directory)
    done = [base.name]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        kinds = sorted(
            {_kind(path) for path in files}
        )  # choose a kind first: some kinds have many files
        kind = rng.choice(kinds)
        path = rng.choice([path for path in files if _kind(path) == kind])
        damages = _DAMAGES[kind] if rng.random() < 0.8 else _TO_ANY
        chosen = rng.choice(damages)
        try:
            chosen(rng, path)
        except (ValueError, KeyError, IndexError, TypeError, struct.error, RecursionError):
            continue  # earlier damage makes this one impossible
        done.append(f"{chosen.__name__.strip('_')} {path.relative_to(directory)}")
    return done


def _kind(path: Path) -> str:
    if path.name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        return path.name
    return {".json": "json", ".safetensors": "weights", ".npy": "npy"}.get(path.suffix, "template")


# ---- any file


def _truncate(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.choice([0, 1, 7, 8, 9, len(data) // 2, max(len(data) - 1, 0)])])


def _flip_bytes(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 4, 64])):
        place = (
            rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(len(data), 99))
        )
        data[place] = rng.randrange(256)
    path.write_bytes(data)


def _insert_bytes(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    place = rng.choice([0, len(data), rng.randrange(len(data) + 1)])
    extra = rng.choice([b"\0", b"\xef\xbb\xbf", b"\xff\xfe", b"\xed\xa0\x80", b"[" * 100_000, b"{"])
    path.write_bytes(data[:place] + extra + data[place:])


def _delete(rng: random.Random, path: Path) -> None:
    path.unlink()


def _become_other_thing(rng: random.Random, path: Path) -> None:
    path.unlink()
    match rng.randrange(4):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to("nowhere")
        case 2:
            path.symlink_to(path.name)
        case 3:
            os.mkfifo(path)


def _become_another_file(rng: random.Random, path: Path) -> None:
    others = sorted(other for other in path.parent.rglob("*") if other.is_file() and other != path)
    path.write_bytes(rng.choice(others).read_bytes())


_TO_ANY: list[Damage] = [
    *(_truncate, _flip_bytes, _flip_bytes, _insert_bytes, _delete),
    *(_become_other_thing, _become_another_file),
]


# ---- JSON

_LONG = "x" * 100_000
_DIGITS = 10**4000 * 10**4000  # more digits than Python parses
_NASTY: list[Json] = [
    *(None, True, False, 0, 1, -1, 2, 7, 2**31 - 1, 2**31, -(2**31) - 1, 2**63, -(2**63), 2**64),
    *(10**30, 0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), "", " ", "a", "0", "</s>"),
    *("\n", "\x1b[31m", "\ud800", "../../etc/passwd", "<|im_end|>", _LONG, [], {}, [[]], [{}]),
    *(
        [{"a": 1}],
        {"a": 1},
        {"content": None},
        [0, -1],
        ["x"] * 1000,
        {"type": "Split"},
        [2, 2**40],
    ),
    *("{{ 'a' * 10**9 }}", "{% for i in range(10**9) %}{% endfor %}", "{% if %}"),
]


def _places(value: Json, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Lists (container, key) of the values within a JSON value; a sample of long ones."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    for key in keys if len(keys) <= 50 else [*keys[:5], *keys[-5:]]:
        found.append((value, key))
        _places(value[key], found)
    return found


def _change(rng: random.Random, value: Json) -> Json:
    """Returns a JSON value with one change."""
    # Top-level values and nested values have the same probability.
    places = [(value, key) for key in value] if rng.random() < 0.5 else _places(value, [])
    holder, key = rng.choice(places)
    match rng.randrange(6):
        case 0 if isinstance(holder, dict):
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(["", " ", "a\nb", _LONG, key + "x", "\x1b[2J"])] = holder.pop(key)
        case 2:
            other_holder, other_key = rng.choice(_places(value, []))
            holder[key] = json.loads(json.dumps(other_holder[other_key]))
        case 3 if isinstance(holder[key], (int, float)):
            factor = rng.choice([-1, 0, 2, 0.5, 10, 1000, 1 << 40])
            holder[key] = type(holder[key])(holder[key] * factor)
        case 4 if isinstance(holder[key], str) and holder[key]:
            text = holder[key]
            place = rng.randrange(len(text))
            holder[key] = rng.choice(
                [text[:place], text + text, text[:place] + "\0" + text[place:]]
            )
        case _:
            holder[key] = rng.choice(_NASTY)
    return value


def _to_text(rng: random.Random, value: Json) -> str:
    text = json.dumps(value)
    if rng.random() < 0.02:
        text = text.replace(" 1", " " + "9" * 10_000, 1)
    if rng.random() < 0.02:
        text = text.replace(": 1", ": " + "[" * 5000 + "]" * 5000, 1)
    if rng.random() < 0.02:
        text = text[:-1] + ", " + text[1:]  # duplicates every name
    return text


def _change_json(rng: random.Random, path: Path) -> None:
    path.write_text(_to_text(rng, _change(rng, json.loads(path.read_text("utf-8")))))


# ---- weights


def _split(path: Path) -> tuple[dict[str, Json], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _change_header(rng: random.Random, path: Path) -> None:
    header, data = _split(path)
    text = _to_text(rng, _change(rng, header)).encode("utf-8")
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _change_length(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    length = rng.choice([0, 1, 2**63, 2**64 - 1, len(data), len(data) - 8, rng.randrange(5000)])
    path.write_bytes(struct.pack("<Q", length) + data[8:])


def _drop_tensor(rng: random.Random, path: Path) -> None:
    """Writes a consistent file in which one tensor is missing, renamed or reshaped."""
    header, data = _split(path)
    name = rng.choice([name for name in header if name != "__metadata__"])
    match rng.randrange(3):
        case 0:
            begin, end = header.pop(name)["data_offsets"]
            data = data[:begin] + data[end:]
            for entry in header.values():
                if "data_offsets" in entry and entry["data_offsets"][0] >= end:
                    entry["data_offsets"] = [at - (end - begin) for at in entry["data_offsets"]]
        case 1:
            other = rng.choice(
                [name + "x", "model." + name, name.replace("0", "7"), "d2t", "é" * 99]
            )
            header[other] = header.pop(name)
        case 2:
            shape = header[name]["shape"]
            header[name]["shape"] = rng.choice(
                [shape[::-1], [*shape, 1], [1, *shape], [int(np.prod(shape))]]
            )
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _spoil_numbers(rng: random.Random, path: Path) -> None:
    """Writes NaN, infinities or noise into one tensor."""
    header, data = _split(path)
    name = rng.choice([name for name in header if name != "__metadata__"])
    begin, end = header[name]["data_offsets"]
    spoilt = bytearray(data)
    patterns = [b"\xff", b"\x7f\x80", b"\x80\x7f", b"\0\x7c", b"\0\0\x80\x7f", b"\xff\x7f", b"\0"]
    for _ in range(rng.choice([1, 1, 10])):
        pattern = rng.choice([*patterns, rng.randbytes(4)]) * rng.choice([1, 1, 64])
        place = begin + rng.randrange(max(end - begin - len(pattern), 1)) // 4 * 4
        spoilt[place : min(place + len(pattern), end)] = pattern[: max(end - place, 0)]
    rest = path.read_bytes()[: -len(data)]
    path.write_bytes(rest + bytes(spoilt[: len(data)]))


# ---- counts of tokens


def _change_npy(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    size = 10 + struct.unpack("<H", data[8:10])[0]
    match rng.randrange(4):
        case 0:
            data[rng.randrange(size)] = rng.randrange(256)
        case 1:
            old, new = rng.choice(
                [
                    (b"<i8", b"|O8"),
                    (b"<i8", b"<f8"),
                    (b"<i8", b"<q9"),
                    (b"(", b"(-"),
                    (b"False", b"{}[0] "),
                ]
            )
            data = data.replace(old, new, 1)
        case 2:
            data[10:size] = rng.choice([b"1+", b"(" * 5000, b"{'descr': ", b"\xff"]).ljust(
                size - 10
            )
        case 3:
            old = rng.choice([b"(400,)", f"({(len(data) - size) // 8},)".encode()])
            new = rng.choice(
                [b"(10**9,)", b"(9999999999999,)", b"()", b"(0,)", b"(-1,)", b"(2, 2)"]
            )
            data = data.replace(old, new, 1)
    path.write_bytes(data)


def _change_counts(rng: random.Random, path: Path) -> None:
    size = rng.choice([0, 1, 99, 399, 401, 5000])
    dtype = rng.choice(["int64", "int32", "uint64", "uint8", "float64", "bool", "complex64", "S3"])
    counts = np.full(size, rng.choice([0, 1, 7])).astype(dtype)
    if counts.size and counts.dtype.kind in "iu" and rng.random() < 0.5:
        counts[0] = np.iinfo(counts.dtype).min if rng.random() < 0.5 else np.iinfo(counts.dtype).max
    np.save(path, counts.reshape(rng.choice([(-1,), (1, -1), (-1, 1)])))


# ---- templates

_TEMPLATES = [
    *("{{ 'a' * 10**9 }}", "{{ 'a' * 10**9 * 10**9 }}", "{% for i in range(10**9) %}x{% endfor %}"),
    *("{{ ([0] * 10**9) | length }}", "{{ 10 ** 10 ** 10 }}", "{{ 'a' | center(10**10) }}"),
    *(
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ messages | tojson(10**9) }}",
    ),
    *(
        "{{ lipsum(10**6) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ''.__class__ }}",
        "{% raw %}",
    ),
    *(
        "{% include 'x' %}",
        "{% extends 'x' %}",
        "{% import 'os' as os %}",
        "{{ self }}",
        "{{ 1 // 0 }}",
    ),
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set n = namespace(a='a') %}{% for i in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ ('a' * 50000) | replace('', 'b' * 50000) }}{{ ('a' * 5000) | list | join('b' * 50000) }}",
    "{{ messages | map('upper') | list }}{{ messages | sum }}{{ '\\ud800' }}",
    "{% set x = 'a' %}" + "{% set x = x ~ x %}" * 99 + "{{ x }}",
    "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
    "{{ " + "-" * 3000 + "1 }}",
    "{{ " + "1+" * 5000 + "1 }}",
    "{% if true %}" * 300 + "{% endif %}" * 300,
    "{{ raise_exception('no\\n\\x1b[31m' * 1000) }}",
    "{{ strftime_now('%' * 100) }}{{ strftime_now(1) }}",
    "{{ (messages | tojson) * 10**7 }}",
    "{{ '1' * 9999 | int }}{{ ('9' * 9999) | int }}{{ 9 ** 9999 }}",
    "{{ range(10**5) | list | batch(1) | list }}{{ range(10**5) | join('a' * 1000) }}",
    "{{ 'a' | indent(10**9) }}{{ 'a' | indent('a' * 10**5 * 10**5) }}",
    "{{ ('a ' * 90000) | wordwrap(1, wrapstring='b' * 90000) }}",
    "{{ 'a' | urlize(10**9) }}{{ ('(' * 99999) | urlize }}{{ '%s' | format('a' * 99999999) }}",
    "{{ 'aaaa' | slice(10**9) | list }}{{ ['a'] | batch(10**9, 'x') | list }}",
    "{{ 'a'.ljust(10**10) }}{{ 'a'.zfill(10**10) }}{{ 'a\\t'.expandtabs(10**10) }}",
    "{{ (1, 2).__add__ }}{{ (10**9).to_bytes(10**9, 'big') }}{{ 2 ** 2 ** 40 }}{{ 1 << 10**11 }}",
]


def _set_template(rng: random.Random, path: Path) -> None:
    path.write_text(rng.choice(_TEMPLATES))


def _add_template(rng: random.Random, path: Path) -> None:
    (path.parent.parent / "chat_template.jinja").write_text(rng.choice(_TEMPLATES))


def _change_template(rng: random.Random, path: Path) -> None:
    text = path.read_text("utf-8")
    a, b = sorted((rng.randrange(len(text)), rng.randrange(len(text))))
    path.write_text(rng.choice([text[:a] + text[b:], text[:b] + text[a:], text[a:] + text[:b]]))


def _set_template_in_config(rng: random.Random, path: Path) -> None:
    config = json.loads(path.read_text("utf-8"))
    text = rng.choice(_TEMPLATES)
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": text}]
    config["chat_template"] = rng.choice([text, named, {"default": text}])
    path.write_text(json.dumps(config))


_DAMAGES: dict[str, list[Damage]] = {
    "config.json": [_change_json],
    "tokenizer.json": [_change_json],
    "tokenizer_config.json": [_change_json, _change_json, _change_json, _set_template_in_config],
    "json": [_change_json],
    "weights": [_change_header, _change_header, _change_length, _drop_tensor, _spoil_numbers],
    "npy": [_change_npy, _change_counts],
    "template": [_set_template, _add_template, _change_template],
}
