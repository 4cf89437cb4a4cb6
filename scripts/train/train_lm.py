"""Trains a small MiniCPM language model on a folder of text and writes a Hugging Face directory.

    python scripts/train/train_lm.py --corpus FOLDER --tokenizer DIR --out DIR --max-minutes 5

If the held-out loss improves, the whole destination is written again. So an interrupted run leaves
the best model so far.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path

import torch
from corpus import (
    BOS_ID,
    EOS_ID,
    IM_END_ID,
    add_corpus_arguments,
    corpus_from_arguments,
    encode,
    plain_stream,
    read_tokenizer,
    training_stream,
)
from directory import add_out_arguments, check_out
from model import Config, Target, minicpm_config, new_minicpm
from safetensors.torch import save_file
from tokenizers import Tokenizer
from trainer import Report, TrainConfig, autocast, stop_on_signals, train

from cpmcu.convert.output import new_directory
from cpmcu.loading.index import check_file

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.15}


def write_model(
    model: Target,
    tokenizer_dir: Path,
    destination: Path,
    card: str,
    sampling: Config = SAMPLED,
) -> None:
    """Writes a complete Hugging Face directory with bf16 weights."""
    state = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.model.state_dict().items()
        if name != "lm_head.weight" or not model.source["tie_word_embeddings"]
    }
    generation = {
        "bos_token_id": BOS_ID,
        "eos_token_id": [EOS_ID, IM_END_ID],
        "pad_token_id": 0,
        **sampling,
    }
    with new_directory(destination) as directory:
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "model.safetensors").chmod(0o644)
        for name in TOKENIZER_FILES:
            shutil.copyfile(tokenizer_dir / name, directory / name)
        contents = {"config.json": model.source, "generation_config.json": generation}
        for name, content in contents.items():
            (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (directory / "README.md").write_text(card, encoding="utf-8")


def model_card(
    name: str,
    model: Target,
    config: TrainConfig,
    report: Report,
    corpus: str,
    hardware: str,
    dropout: float,
) -> str:
    shape = model.model.config
    parameters = model.model.num_parameters()
    loss = "not measured"
    if math.isfinite(report.best_validation_loss):
        loss = f"{report.best_validation_loss:.3f} nats per token"
    return f"""# {name}

A small MiniCPM-architecture language model: {parameters / 1e6:.2f} M parameters,
{shape.num_hidden_layers} layers, hidden size {shape.hidden_size}, \
{shape.num_attention_heads} query and {shape.num_key_value_heads} key/value heads of
{shape.head_dim}, intermediate size {shape.intermediate_size}, vocabulary {shape.vocab_size}, \
context {shape.max_position_embeddings}, bf16, tied embeddings.

- Data: {corpus}
- Training: {report.steps} steps, {report.tokens / 1e6:.0f} M tokens in windows of \
{config.seq_len}, {report.minutes:.1f} minutes on {hardware},
  {report.tokens_per_second / 1e6:.2f} M tokens/s; AdamW, peak learning rate \
{config.learning_rate:g}, cosine schedule, weight decay {config.weight_decay:g},
  dropout {dropout:g}.
- Held-out loss: {loss}.
- Recipe: `scripts/train/` in the cpmcu repository.

The tokenizer puts `<s>` before every encoded text. The chat template is ChatML-like and does not
print `<s>` itself: render it and encode the result as ordinary text with special tokens on.
Generation ends at `</s>` (id 2) or `<|im_end|>` (id 4).

It exists to try and to test the engine. It completes Python-like text; it knows nothing.
"""


def print_samples(model: Target, tokenizer: Tokenizer, prompts: list[str], count: int) -> None:
    ends = {"eos_token_id": [EOS_ID, IM_END_ID], "pad_token_id": 0}
    for prompt in prompts:
        ids = torch.tensor([[BOS_ID, *encode(tokenizer, [prompt])[0]]], device=model.device)
        for temperature in (0.0, 0.7):
            how = {"do_sample": True, "temperature": temperature} if temperature else {}
            with autocast(model.device):
                whole = model.model.generate(ids, max_new_tokens=count, **ends, **how)
            new = whole[0, ids.shape[1] :].tolist()
            text = tokenizer.decode(new, skip_special_tokens=False)
            print(f"---- temperature {temperature}: {prompt!r}\n{prompt}{text}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_corpus_arguments(parser)
    parser.add_argument(
        "--pieces-share",
        type=float,
        default=1.0,
        help="share of files that are also cut into short documents",
    )
    parser.add_argument("--corpus-note", default="", help="one sentence on the data, for the card")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with the tokenizer")
    add_out_arguments(parser)
    parser.add_argument(
        "--prompt", action="append", default=[], help="prompt to complete at the end; repeatable"
    )
    parser.add_argument("--sample-tokens", type=int, default=120)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")

    shape = parser.add_argument_group("model")
    for name in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "max_position_embeddings",
        "scale_emb",
        "scale_depth",
        "dim_model_base",
    ):
        default = minicpm_config()[name]
        flag = f"--{name.replace('_', '-')}"
        shape.add_argument(flag, type=type(default), default=default)
    shape.add_argument("--dropout", type=float, default=0.0, help="dropout of each residual branch")

    run = parser.add_argument_group("training")
    defaults = TrainConfig()
    for name in TrainConfig.__slots__:
        default = getattr(defaults, name)
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            run.add_argument(flag, action="store_true")
        else:
            run.add_argument(flag, type=type(default), default=default)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    check_out(args, args.tokenizer)
    for name in TOKENIZER_FILES:
        check_file(args.tokenizer / name)
    config = TrainConfig(**{name: getattr(args, name) for name in TrainConfig.__slots__})
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(config.seed)

    tokenizer = read_tokenizer(args.tokenizer)
    train_documents, validation_documents = corpus_from_arguments(args)
    stream = training_stream(tokenizer, train_documents, config.seed, args.pieces_share)
    validation = plain_stream(tokenizer, validation_documents) if validation_documents else None
    held_out = len(validation.ids) if validation else 0
    print(
        f"{len(train_documents)} files, {len(stream.ids) / 1e6:.2f} M training tokens in "
        f"{len(stream.starts)} documents; {len(validation_documents)} files, "
        f"{held_out / 1e6:.2f} M tokens held out",
        flush=True,
    )

    shape = {k: v for k, v in vars(args).items() if k in minicpm_config()}
    source = minicpm_config(**shape | {"vocab_size": tokenizer.get_vocab_size()})
    model = new_minicpm(source, config.seed, args.dropout)
    model.model.to(device)
    hardware = "one GPU" if device.type == "cuda" else "a CPU"
    if device.type == "cuda":
        hardware = f"one {torch.cuda.get_device_name(device)}"
    parameters = model.model.num_parameters()
    print(f"{parameters / 1e6:.2f} M parameters on {hardware}", flush=True)

    corpus = args.corpus_note or f"{len(train_documents)} text files."

    def save(report: Report) -> None:
        card = model_card(args.out.name, model, config, report, corpus, hardware, args.dropout)
        write_model(model, args.tokenizer, args.out, card)

    report = train(model.model, model.loss, stream, validation, config, save, stop_on_signals())
    print(
        f"{report.steps} steps, {report.tokens / 1e6:.1f} M tokens, {report.minutes:.2f} min, "
        f"{report.tokens_per_second / 1e3:.0f}K tok/s, best validation loss "
        f"{report.best_validation_loss:.4f}, written to {args.out}",
        flush=True,
    )
    model.model.eval()
    print_samples(model, tokenizer, args.prompt, args.sample_tokens)


if __name__ == "__main__":
    main()
