"""FR-Spec: the rows of the target's lm_head that a draft uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu.drafters.frspec import keep_eos
from cpmcu.tokenizer import eos_ids
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.reference.tiny_drafts import write_draft
from tests.unit.drafts import opened, refused, spec_of


def frspec(target: TinyCheckpoint, draft: Path, path: Path | None = None, size: int = 0) -> Any:
    options = {"frspec_path": path and str(path), "frspec_vocab_size": size}
    options["spec_topk_per_iter"] = 3  # enough tokens for this topk
    return spec_of(opened(target, draft, **options)).vocab_ids


def test_counts(target: TinyCheckpoint, tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "d", "eagle", target).directory
    counts = np.arange(203)[::-1].copy()
    np.save(draft / "token_counts.npy", counts)
    assert frspec(target, draft, size=5) == [0, 1, 2, 3, 4]
    np.save(draft / "token_counts.npy", np.arange(203))
    assert frspec(target, draft, size=5) == [
        202,
        201,
        200,
        199,
        2,
    ]  # eos replaces the least frequent token
    np.save(draft / "token_counts.npy", np.arange(190))  # the model's vocabulary is padded
    assert frspec(target, draft, size=3) == [189, 188, 2]
    assert "must be 1 to 203" in refused(target, draft, frspec_path=str(draft / "token_counts.npy"))
    np.save(tmp_path / "ids.npy", np.array([9, 2, 7]))
    assert frspec(target, draft, tmp_path / "ids.npy") == [9, 2, 7]
    assert frspec(target, draft, tmp_path / "ids.npy", 3) == [9, 2, 7]


def test_torch_index(target: TinyCheckpoint, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    draft = write_draft(tmp_path / "d", "eagle3_shared", target).directory
    torch.save([5, 2, 8, 1], draft / "freq_4.pt")
    assert frspec(target, draft, size=4) == [5, 2, 8, 1]
    assert frspec(target, draft, draft) == [5, 2, 8, 1]
    assert frspec(target, draft, draft / "freq_4.pt", 4) == [5, 2, 8, 1]
    torch.save({"a": object}, draft / "freq_7.pt")
    torch.save([1.5], draft / "freq_8.pt")
    torch.save([2**70], draft / "freq_6.pt")
    torch.save([5, 2], draft / "freq_5.pt", _use_new_zipfile_serialization=False)
    whole = (draft / "freq_5.pt").read_bytes()
    for length in range(len(whole) - 1):
        (draft / "freq_5.pt").write_bytes(whole[:length])
        assert "cannot read it as plain data" in refused(target, draft, frspec_vocab_size=5)
    assert "has ids beyond 64 bits" in refused(target, draft, frspec_vocab_size=6)
    assert "cannot read it as plain data" in refused(target, draft, frspec_vocab_size=7)
    assert "expected a list of token ids" in refused(target, draft, frspec_vocab_size=8)
    named = {"frspec_path": str(draft / "freq_4.pt"), "frspec_vocab_size": 3}
    assert "has 4 tokens, expected frspec_vocab_size 3" in refused(target, draft, **named)
    assert "freq_6.pt, freq_7.pt, freq_8.pt, expected exactly one" in refused(
        target, draft, frspec_path=str(draft)
    )


@pytest.mark.parametrize(
    ("options", "most"), [({}, 8), ({"spec_auto": False}, 10), ({"spec_topk_per_iter": 3}, 3)]
)
def test_fewer_tokens_than_topk(
    target: TinyCheckpoint, tmp_path: Path, options: dict[str, Any], most: int
) -> None:
    plain = write_draft(tmp_path / "plain", "eagle", target).directory
    for count in (most - 1, most):
        drafted = {"d2t": np.zeros(count, np.int64), "lm_head.weight": np.ones((count, 64))}
        few = write_draft(
            *(tmp_path / "few", "eagle3", target), extra=drafted, draft_vocab_size=count
        ).directory
        np.save(tmp_path / "ids.npy", np.arange(count))
        for draft, more in ((few, {}), (plain, {"frspec_path": str(tmp_path / "ids.npy")})):
            if count == most:
                assert opened(target, draft, **options, **more).shape.topk == most
            else:
                message = refused(target, draft, **options, **more)
                assert f"only {count} tokens are drafted, expected at least {most}" in message


def test_a_vocabulary_smaller_than_topk(tmp_path: Path) -> None:
    small = write_tiny(tmp_path / "target", "llama", vocab_size=12)
    draft = write_draft(tmp_path / "draft", "eagle", small).directory
    message = refused(small, draft, spec_num_iter=2, spec_topk_per_iter=16)
    assert "only 12 tokens are drafted, expected at least 16" in message


def test_wrong_frspec(target: TinyCheckpoint, tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "d", "eagle", target).directory
    path = tmp_path / "ids.npy"

    def complaint(array: Any) -> str:
        np.save(path, array)
        return refused(target, draft, frspec_path=str(path))

    missing = refused(target, draft, frspec_path=str(tmp_path / "none.npy"))
    assert missing.startswith("frspec_path: ") and "none.npy' is neither a file" in missing
    assert "has ids 2 to 203, expected some of 0 to 202" in complaint(np.array([2, 203]))
    assert "has ids twice" in complaint(np.array([2, 3, 3]))
    assert "has no ids" in complaint(np.zeros(0, np.int64))
    assert "expected a list of integers" in complaint(np.ones(4))
    with path.open("wb") as file:
        np.savez(file, np.arange(9))
    zipped = path.read_bytes()
    for content in (b"nothing", b"", zipped, zipped[:-9]):
        path.write_bytes(content)
        assert "is not a numpy file" in refused(target, draft, frspec_path=str(path))
    assert "has no freq_N.pt, expected freq_9.pt or token_counts.npy" in refused(
        target, draft, frspec_vocab_size=9
    )
    assert "neither a file nor a directory" in refused(target, draft, frspec_path="/no/such/file")


@pytest.mark.parametrize("kind", ["eagle3", "model"])
def test_frspec_needs_a_shared_head(target: TinyCheckpoint, tmp_path: Path, kind: str) -> None:
    draft = write_draft(tmp_path / "d", kind, target).directory
    of_kind = {
        "eagle3": "expected a head that shares the target's lm_head",
        "model": "frspec_vocab_size is 5, expected none for a draft of kind model",
    }
    assert of_kind[kind] in refused(target, draft, frspec_vocab_size=5)
    assert "expected none for a draft of kind ngram" in refused(
        target, None, method="ngram", frspec_vocab_size=5
    )


def test_keep_eos() -> None:
    assert keep_eos([5, 6, 7], []) == [5, 6, 7]
    assert keep_eos([5, 2, 7], [2]) == [5, 2, 7]
    assert keep_eos([5, 6, 2], [3, 2]) == [5, 2, 3]
    assert keep_eos([5, 6, 7], [2, 3, 2]) == [5, 2, 3]
    assert eos_ids({"a": {"eos_token_id": [2, 9]}, "b": {"eos_token_id": 2}, "c": {}}) == (2, 9)
