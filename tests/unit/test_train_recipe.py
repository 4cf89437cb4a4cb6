"""The shipped tokenizer and model, and the training recipe that made them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.recipe import import_recipe

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "cpmcu" / "assets" / "tiny-python-minicpm"

NASTY_TEXTS = [
    "def f(n):\n    if n:\n        return [1, 2][n]\n\n\n\n# end\n",
    "\tif x:\n\t\t  y = 'mixed \t indent'\r\n",
    "   leading and trailing   ",
    " ",
    "\n\n \n\t\n",
    "数据集与模型：你好，世界！",
    "emoji 🎉🧑‍🚀 and flags 🇳🇴, combining e\u0301, zero\u200bwidth, nbsp\u00a0",
    "\x00\x01\x7f control, \ufeff bom, \U0010ffff",
    "word" * 200 + " " * 133 + "=" * 77 + "0123456789" * 5,
    'it\'s <b>html</b> & {% template %} \\n "quotes"',
]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))


@pytest.fixture(scope="module")
def recipe() -> Iterator[SimpleNamespace]:
    with import_recipe() as modules:
        yield modules


# ---- tokenizer


@pytest.mark.parametrize("text", NASTY_TEXTS)
def test_round_trip_is_lossless(tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_and_bos(tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 4096
    for index, token in enumerate(("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")):
        assert tokenizer.token_to_id(token) == index
    with_bos = tokenizer.encode("import os").ids
    assert with_bos == [1, *tokenizer.encode("import os", add_special_tokens=False).ids]
    assert tokenizer.decode(with_bos) == "import os"  # no prefix space is added or removed


@pytest.mark.parametrize("width", [4, 8, 12, 16])
def test_indentation_is_one_token(tokenizer, width: int) -> None:
    tokens = tokenizer.encode(" " * width + "return x", add_special_tokens=False).tokens
    assert tokens == ["Ġ" * width, "return", "Ġx"]


def test_chat_template_gives_one_bos(tokenizer) -> None:
    jinja2 = pytest.importorskip("jinja2")
    config = json.loads((SHIPPED / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] is True
    template = jinja2.Template(config["chat_template"])
    messages = [{"role": "user", "content": "hi"}]
    text = template.render(messages=messages, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text).ids
    assert ids.count(1) == 1 and ids[:2] == [1, 3] and ids.count(4) == 1


# ---- corpus


def test_corpus_is_split_by_content(recipe: SimpleNamespace, tmp_path: Path) -> None:
    for name, text in (("a.py", "x = 1\n"), ("b/c.py", "y = 2\n"), ("b/copy.py", "x = 1\n")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "skip").mkdir()
    (tmp_path / "skip" / "d.py").write_text("z = 3\n")
    (tmp_path / "notes.txt").write_text("not code\n")
    documents = recipe.corpus.read_corpus([tmp_path], exclude=["ski*"])
    assert sorted(document.text for document in documents) == ["x = 1\n", "y = 2\n"]
    train, validation = recipe.corpus.split(documents, validation_permille=1000)
    assert (len(train), len(validation)) == (0, 2)


def test_a_device_is_no_input(recipe: SimpleNamespace, tmp_path: Path) -> None:
    """A device may have no end. /dev/null in its place has one, so a failing test ends."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to("/dev/null")
    shutil.copyfile(SHIPPED / "model.safetensors", tmp_path / "model.safetensors")
    args = SimpleNamespace(seed=0, generated=[Path("/dev/null")])
    tokenizer = recipe.corpus.read_tokenizer(SHIPPED)
    form = recipe.corpus.RECIPE_FORMAT
    documents = [recipe.corpus.Document("a.py", "x = 1\n", "0")]
    for read in (
        lambda: recipe.model.read_state(tmp_path),
        lambda: recipe.head_files.load_head(tmp_path, None),
        lambda: recipe.quantize.write_quantized(tmp_path, tmp_path / "out", {}, None, ""),
        lambda: recipe.corpus.read_tokenizer(tmp_path),
        lambda: recipe.draft_run.draft_stream(args, tokenizer, documents, form),
    ):
        with pytest.raises(ValueError, match="is a device or pipe, expected a file"):
            read()


def test_streams_begin_documents_with_bos(recipe: SimpleNamespace, tokenizer) -> None:
    texts = ["def f(x):\n    '''Add one.'''\n    return x + 1\n\n\ndef g():\n    pass\n", "<s>\n"]
    documents = [recipe.corpus.Document(f"{i}.py", t, str(i)) for i, t in enumerate(texts)]
    stream = recipe.corpus.training_stream(tokenizer, documents, seed=0)
    again = recipe.corpus.training_stream(tokenizer, documents, seed=0)
    assert (stream.ids == again.ids).all()
    assert (stream.ids[stream.starts] == 1).all()
    assert (stream.ids == 1).sum() == len(stream.starts)  # the text "<s>" is no BOS
    assert (stream.ids == 2).sum() == len(stream.starts)
    plain = recipe.corpus.plain_stream(tokenizer, documents)
    assert tokenizer.decode(plain.ids.tolist()) == "".join(texts)


# ---- model


def test_five_steps_lower_the_loss_and_the_directory_loads(
    recipe: SimpleNamespace, tokenizer, tmp_path: Path
) -> None:
    import torch

    torch.manual_seed(0)
    text = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(40))
    documents = [recipe.corpus.Document("a.py", text, "0")]
    stream = recipe.corpus.training_stream(tokenizer, documents, seed=0)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 128}
    source = recipe.model.minicpm_config(**shape)
    model = recipe.model.new_minicpm(source, seed=0)
    config = recipe.trainer.TrainConfig(
        steps=5, batch_size=4, seq_len=64, warmup_steps=1, learning_rate=1e-2, log_every=1
    )
    out = tmp_path / "model"

    def save(report) -> None:
        recipe.train_lm.write_model(model, SHIPPED, out, "# card\n")

    report = recipe.trainer.train(model.model, model.loss, stream, stream, config, save)
    assert report.steps == 5
    assert report.losses[-1] < report.losses[0] - 0.5
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    for name in ("config.json", "generation_config.json", "tokenizer.json", "README.md"):
        assert (out / name).is_file()

    loaded = recipe.model.load_pretrained(out)
    ids = torch.tensor([[1, 5, 9, 200, 3000]])
    with torch.no_grad():
        model.model.eval()
        difference = (loaded(ids).logits - model(ids).logits).abs().max()
    assert difference < 0.05  # bf16 rounding of the weights


@pytest.mark.parametrize(
    ("script", "more", "out", "message"),
    [
        ("train_tokenizer", [], "mine", "mine is not empty, expected a new directory .--overwrite"),
        ("train_tokenizer", ["--overwrite"], "mine", "mine holds files but no tokenizer.json"),
        (
            "train_tokenizer",
            [],
            "text/out",
            "is inside the source .*text, expected a directory outs",
        ),
        ("train_lm", ["--tokenizer", "model"], "model", "model is or holds the source"),
        ("train_head", ["--target", "model", "--overwrite"], ".", "is or holds the source"),
        ("quantize", ["--target", "model"], "mine", "mine is not empty, expected a new directory"),
        ("quantize", ["--target", "x", "--draft", "model"], "model", "is or holds the source"),
    ],
)
def test_existing_files_are_kept(
    recipe: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    more: list[str],
    out: str,
    message: str,
) -> None:
    """The check comes before any file is read, since only the directories exist."""
    for name in ("mine", "model", "text"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "diary.txt").write_text("dear diary")
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, "--corpus", "text", *more, "--out", out])
    with pytest.raises(SystemExit, match=message):
        getattr(recipe, script).main()
    assert len(list(tmp_path.glob("*/diary.txt"))) == 3


def test_cached_decoding_equals_one_pass(recipe: SimpleNamespace) -> None:
    import torch

    model = recipe.model.load_pretrained(SHIPPED)
    ids = torch.randint(5, 4096, (1, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(ids, aux_layers=(1, 3))
        past, parts = None, []
        for chunk in ids.split([20, 1, 27], dim=1):
            output = model(chunk, past)
            past = output.cache
            parts.append(output.logits)
    assert (torch.cat(parts, dim=1) - whole.logits).abs().max() < 1e-4
    assert len(whole.aux_hidden) == 2 and whole.aux_hidden[0].shape == whole.hidden.shape


def test_shipped_model_completes_python(recipe: SimpleNamespace, tokenizer) -> None:
    import torch

    model = recipe.model.load_pretrained(SHIPPED)
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 9_000_000
    for prompt, expected in (
        ("for i in range(", "10):"),
        ("import os\n\ndef ", "join(path):"),
    ):
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        new = model.model.generate(ids, max_new_tokens=4, eos_token_id=[2, 4], pad_token_id=0)
        assert tokenizer.decode(new[0, ids.shape[1] :].tolist()).startswith(expected), prompt


def test_shipped_model_agrees_with_transformers(recipe: SimpleNamespace) -> None:
    """A Llama with the three scales folded into its weights computes the same logits."""
    import torch

    transformers = pytest.importorskip("transformers", reason="the oracle is transformers' Llama")
    model = recipe.model.load_pretrained(SHIPPED)
    config = model.model.config
    oracle = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=False,  # theta 10000 is transformers' default
        )
    ).eval()
    weights = dict(model.model.state_dict())
    table = weights["model.embed_tokens.weight"]
    source = json.loads((SHIPPED / "config.json").read_text())
    scale = source["scale_depth"] / source["num_hidden_layers"] ** 0.5
    weights["lm_head.weight"] = table * source["dim_model_base"] / source["hidden_size"]
    weights["model.embed_tokens.weight"] = table * source["scale_emb"]
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weights[name] * scale
    oracle.load_state_dict(weights)
    ids = torch.randint(5, 4096, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (oracle(ids).logits - model(ids).logits).abs().max()
    assert difference < 1e-3


# ---- several processes

STEP = """
import subprocess
import sys
sys.path.insert(0, sys.argv[1])
import processes
rank = processes.join()
import torch
from trainer import TrainConfig, train
layer = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(layer.weight)
class Batches(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield {"input_ids": torch.full((1, 1), rank), "labels": torch.full((1, 1), 0)}
seen = []
def loss(ids, targets):
    seen.append(layer.weight.item())
    return layer(10.0 ** ids.float()).sum()
config = TrainConfig(steps=3, batch_size=1, seq_len=1, warmup_steps=1, learning_rate=0.1)
report = train(layer, loss, Batches(), None, config)
same = processes.from_first(layer.weight.item(), layer.weight.device) == layer.weight.item()
processes.leave()
with open(f"{sys.argv[2]}/{rank}", "w") as file:
    file.write(f"{same} {report.tokens} {len(seen)}")
print("printed by", rank)
"""


def test_processes_train_one_model(tmp_path: Path) -> None:
    """Two processes with other data keep equal weights and stop after the same step."""
    pytest.importorskip("transformers", reason="the recipe trains with transformers")
    (tmp_path / "step.py").write_text(STEP)
    scripts = ROOT / "scripts" / "train"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*command, str(tmp_path / "step.py"), str(scripts), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert [(tmp_path / name).read_text() for name in "01"] == ["True 6 3", "True 6 3"]
    assert "printed by 0" in result.stdout and "printed by 1" not in result.stdout
