"""Speculation with other heads: FR-Spec, quantised draft heads, quantised target heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.drafted import (
    COUNT,
    PROMPTS,
    SAMPLINGS,
    TREES,
    VOCAB,
    Drive,
    Models,
    family_of,
)
from tests.engine.harness import SMALL
from tests.reference.engines import extension_or_skip
from tests.reference.tiny_checkpoints import write_tiny
from tests.reference.tiny_drafts import write_draft
from tests.reference.tiny_w4 import quantise, write_w4

extension_or_skip()


@pytest.mark.parametrize("quant", ["w4"] if SMALL else ["none", "w8", "w4"])
@pytest.mark.parametrize(
    "kind",
    ["eagle"] if SMALL else ["eagle", "minicpm_eagle_hf", "eagle3_shared", "eagle_w4", "dspark"],
)
def test_frspec(models: Models, kind: str, quant: str) -> None:
    import numpy as np

    family = family_of(kind)
    path = models.root / "frequent.npy"
    np.save(path, np.arange(2, VOCAB, 3))
    draft = str(models.draft(kind, family))
    speculation = {"draft_model_path": draft, "frspec_path": str(path), **TREES["wide"]}
    speculation["draft_head_quant"] = quant
    drive = Drive(models.engine(family, speculation))
    for ids in PROMPTS[:4]:
        assert drive.one(ids, 40) == models.plain(family, ids, 40)


@pytest.mark.parametrize("quant", ["w8"] if SMALL else ["w8", "w4"])
@pytest.mark.parametrize("kind", ["itself", "eagle", "eagle3", "dflash2"])
def test_a_quantised_draft_head(models: Models, kind: str, quant: str) -> None:
    """The quantised head is the target's, or the draft's own."""
    draft = str(models.draft(kind, "llama"))
    shape = TREES["chain" if kind == "dflash2" else "narrow"]
    speculation = {"draft_model_path": draft, "draft_head_quant": quant, **shape}
    drive = Drive(models.engine("llama", speculation))
    for i, ids in enumerate(PROMPTS[:4]):
        fields = list(SAMPLINGS.values())[i]
        assert drive.one(ids, 40, **fields) == models.plain("llama", ids, 40, **fields)
        if kind == "itself" and quant == "w8" and not fields:
            assert len(drive.emitted) < 20  # acceptance stays nearly the same


@pytest.mark.parametrize("kind", ["itself", "eagle", "eagle3", "minicpm_eagle", "dflash2"])
def test_layers_quantised_at_load(models: Models, kind: str) -> None:
    family = family_of(kind)
    shape = TREES["chain" if kind == "dflash2" else "narrow"]
    draft = {"draft_model_path": str(models.draft(kind, family)), **shape}
    rounds, whole = (
        Drive(models.engine(family, {**draft, "draft_quant": quant})) for quant in ("w4", "none")
    )
    for i, ids in enumerate(PROMPTS[:4]):
        fields = list(SAMPLINGS.values())[i]
        assert rounds.one(ids, 40, **fields) == models.plain(family, ids, 40, **fields)
    if kind == "itself":  # acceptance stays nearly the same
        for drive in (rounds, whole):
            drive.one(PROMPTS[0], 40)
        assert len(rounds.emitted) < len(whole.emitted) + 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["eagle_bias", "minicpm_eagle", "minicpm_eagle_hf", "eagle3", "model"]
)
def test_quantised_draft_equals_its_dequantised_draft(models: Models, kind: str) -> None:
    """All layouts yield the same steps. In float32 they are those of the dequantised draft."""
    family = f"{family_of(kind)}_gptq"
    target = models.target(family)
    dense = write_draft(models.root / f"{kind}-dense", kind, target, dtype=models.dtype)
    weights = quantise(dense.weights)
    ids = PROMPTS[5 if kind.startswith("minicpm") else 4]  # some drafted tokens are right
    layouts = ["marlin", {"eagle_bias": "gptq", "eagle3": "awq"}.get(kind, "compressed")]
    layouts += ["dense"] if models.dtype == "float32" else []
    seen = []
    for layout in layouts:
        directory = write_w4(models.root / f"{kind}-{layout}", dense.config, weights, layout)
        draft = {"draft_model_path": str(directory), "draft_head_quant": "none", **TREES["full"]}
        drive = Drive(models.engine(family, draft))
        assert drive.one(ids, COUNT) == models.plain(family, ids, COUNT)
        seen.append(drive.emitted)
    assert all(steps == seen[0] for steps in seen)
    assert max(seen[0]) > 1


@pytest.mark.parametrize("kind", ["itself", "eagle", "eagle with FR-Spec"])
@pytest.mark.parametrize("family", ["llama"] if SMALL else ["llama", "llama_gptq"])
def test_a_quantised_target_head(models: Models, kind: str, family: str) -> None:
    """lm_head_quant changes the text, and speculation yields the changed text."""
    import numpy as np

    kind, _, frspec = kind.partition(" with ")
    plain = Drive(models.engine(family, None, lm_head_quant="w4"))
    speculation = {"draft_model_path": str(models.draft(kind, family)), **TREES["narrow"]}
    if frspec:
        np.save(models.root / "some.npy", np.arange(2, VOCAB, 3))
        speculation["frspec_path"] = str(models.root / "some.npy")
    drafted = Drive(models.engine(family, speculation, lm_head_quant="w4"))
    same = True
    for ids in PROMPTS[:5]:
        tokens = drafted.one(ids, 40)
        assert tokens == plain.one(ids, 40)
        same &= tokens == models.plain(family, ids, 40)
    assert not same


@pytest.mark.parametrize("kind", ["eagle"] if SMALL else ["eagle", "eagle3", "model"])
def test_a_target_head_stored_quantised(models: Models, tmp_path: Path, kind: str) -> None:
    """A quantised draft with default options shares the target's head or has its own."""
    from cpmcu.config import EngineConfig, SpeculativeConfig
    from cpmcu.loading.loader import load_model

    sizes = {"vocab_size": VOCAB, "hidden_size": 128, "head_dim": 64, "num_hidden_layers": 3}
    target = write_tiny(tmp_path / "target", "llama", dtype=models.dtype, **sizes)
    dense = write_draft(tmp_path / "draft", kind, target, dtype=models.dtype)
    write_w4(target.directory, target.config, quantise(target.weights, extra=("lm_head",)), "gptq")
    write_w4(dense.directory, dense.config, quantise(dense.weights), "gptq")

    def tokens(**speculation: Any) -> list[int]:
        config = {"device": models.device, "dtype": models.dtype, "memory_limit": 0.2}
        speculative = SpeculativeConfig(**speculation)
        config |= {"max_num_seqs": 1, "num_threads": 1, "speculative_config": speculative}
        return Drive(load_model(str(target.directory), config=EngineConfig(**config)).engine).one(
            PROMPTS[4], 20
        )

    assert tokens(draft_model_path=str(dense.directory)) == tokens(no_speculation=True)
