"""Models that `convert quantize` wrote: the engine's logits, and the layers it calibrates with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cpmcu.convert.compare import Difference, compare
from cpmcu.loading.checkpoint import open_checkpoint
from cpmcu.models.common import BuildOptions, SpecFields
from cpmcu.models.registry import find_model
from tests.engine.test_families import CASES
from tests.reference.engines import engine_logits, extension_or_skip, random_ids
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.tolerances import LOGITS, assert_close

torch = pytest.importorskip("torch")
from cpmcu.convert import quantize as quantize_module  # noqa: E402
from cpmcu.convert.dense_layers import STAGES, DenseLayers, check_dense  # noqa: E402
from cpmcu.convert.quantize import quantize  # noqa: E402
from cpmcu.convert.quantize_options import QuantizeOptions  # noqa: E402
from cpmcu.convert.rounding import SUFFIXES, dequantize_state  # noqa: E402
from tests.reference.tiny_mixed import decode  # noqa: E402

extension_or_skip()

FAMILIES = {"llama": {}, "qwen2": {}, "qwen3": {}, "minicpm": {}}
# Families whose layers have more than attention and an MLP of Llama's form.
OTHERS = (
    "ministral3",
    "olmo",
    "gpt_oss",
    "gemma4",
    "muse",
    "granite_swa",
    "lfm2",
    "lfm3",
    "nemotron_h",
    "granite hybrid",
)
REFUSED = [name for name in CASES if name.startswith(OTHERS)]
LENGTH = 70


def fields_of(tiny: TinyCheckpoint) -> SpecFields:
    options = BuildOptions(has_lm_head="lm_head.weight" in tiny.weights)
    return find_model(tiny.config).build(tiny.config, options)


@pytest.mark.parametrize("name", REFUSED)
def test_gptq_of_other_layers_is_refused(tmp_path: Path, name: str) -> None:
    family, config = CASES[name]
    fields = fields_of(write_tiny(tmp_path, family, **config))
    with pytest.raises(ValueError, match="method is 'gptq', but the model has layers of "):
        check_dense(fields)


@pytest.mark.parametrize("name", [*FAMILIES, *(name for name in CASES if name not in REFUSED)])
def test_layers_compute_what_the_engine_does(tmp_path: Path, name: str) -> None:
    family, config = CASES.get(name, (name, {}))
    tiny = write_tiny(tmp_path, family, **config)
    ids = random_ids(tiny.config["vocab_size"], LENGTH)
    model, fields = find_model(tiny.config), fields_of(tiny)
    check_dense(fields)
    layers = DenseLayers(open_checkpoint(tmp_path), model.names, fields, torch.device("cpu"))
    batches = layers.embed([torch.tensor([ids, ids[::-1]])])
    seen: list[tuple[str, ...]] = []
    for index in range(fields.num_hidden_layers):
        layers.layer(index).run(batches, lambda leaves, inputs: seen.append(leaves))
    assert seen == [*STAGES] * fields.num_hidden_layers
    hidden = batches[0][0].numpy()
    hidden = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + fields.rms_norm_eps)
    hidden = hidden * tiny.weights["model.norm.weight"] * fields.logit_scale
    head = "model.embed_tokens.weight" if fields.tie_word_embeddings else "lm_head.weight"
    assert_close(hidden @ tiny.weights[head].T, engine_logits(tmp_path, ids), LOGITS["float32"])


@pytest.mark.parametrize("group_size", [128, -1])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_8_bits(tmp_path: Path, method: str, group_size: int) -> None:
    """The logits are those of the twin, and close to the original's."""
    from safetensors.torch import load_file, save_file

    write_tiny(tmp_path / "in", "qwen3", hidden_size=128, head_dim=32)
    text = tmp_path / "text.txt"
    text.write_text("text")
    options = QuantizeOptions(method=method, bits=8, group_size=group_size, calibration=text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize_module, "read_text", lambda *_: random_ids(200, 60))
        quantize(str(tmp_path / "in"), tmp_path / "out", options)
    state = load_file(tmp_path / "out" / "model.safetensors")
    twin = {name: tensor for name, tensor in state.items() if "_proj." not in name}
    for name in state:
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            parts = {part: state[f"{module}.{part}"] for part in SUFFIXES}
            twin[f"{module}.weight"] = torch.from_numpy(decode("gptq8", parts)).float()
    write_tiny(tmp_path / "twin", "qwen3", hidden_size=128, head_dim=32)
    save_file(twin, tmp_path / "twin" / "model.safetensors")
    ids = random_ids(200, LENGTH)
    found, expected, original = (
        engine_logits(tmp_path / each, ids, dtype="float32") for each in ("out", "twin", "in")
    )
    assert_close(found, expected, LOGITS["float32"])
    assert 0 < np.abs(found - original).max() < 0.02 * np.abs(original).max()


@pytest.mark.parametrize("name", ["qwen2", "phi3", "qwen3moe"])
def test_the_engine_reads_what_was_written(tmp_path: Path, name: str) -> None:
    """Fused projections (phi3) and experts keep their names; the logits are those of the twin."""
    from safetensors.torch import load_file, save_file

    tiny = write_tiny(tmp_path / "in", name, hidden_size=128, moe_intermediate_size=48)
    options = QuantizeOptions(group_size=128 if name == "qwen2" else -1)
    quantize(str(tmp_path / "in"), tmp_path / "out", options)
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert any(".qweight" in key for key in state)
    write_tiny(tmp_path / "twin", name, hidden_size=128, moe_intermediate_size=48)
    save_file(dequantize_state(state, options.to_hf()), tmp_path / "twin" / "model.safetensors")
    ids = random_ids(tiny.config["vocab_size"], LENGTH)
    expected = engine_logits(tmp_path / "twin", ids, dtype="float32")
    assert_close(engine_logits(tmp_path / "out", ids, dtype="float32"), expected, LOGITS["float32"])


def test_compared_models(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "a", "llama")
    other = dict(tiny.weights)
    other["lm_head.weight"] = other["lm_head.weight"] * 1.1
    write_tiny(tmp_path / "b", "llama", weights=other)
    ids = random_ids(tiny.config["vocab_size"], 300)
    same = compare(tmp_path / "a", tmp_path / "a", ids)
    assert set(same.errors) == {0.0} and same.agreeing == len(same.errors) == 298
    found = compare(tmp_path / "a", tmp_path / "b", ids)
    expected = Difference()
    for window in (ids[:256], ids[256:]):
        logits = engine_logits(tmp_path / "a", window), engine_logits(tmp_path / "b", window)
        logs = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in logits]
        p = np.exp(logs[0])
        rows = np.arange(len(window) - 1)
        expected.errors += (logs[1] - logs[0])[rows, window[1:]].tolist()
        expected.divergences += (p * (logs[0] - logs[1])).sum(-1)[:-1].tolist()
    assert np.allclose(found.errors, expected.errors, atol=1e-4)
    assert np.allclose(found.divergences, expected.divergences, atol=1e-4)
    assert 0 < np.mean(found.divergences) < 1
