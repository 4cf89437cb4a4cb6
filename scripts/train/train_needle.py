"""Trains a small MiniCPM model with a sparse_config to find numbers in long texts.

    python scripts/train/train_needle.py --out DIR

The texts are those of cpmcu/benchmarks/needle_text.py, but each statement comes twice: the model
learns to give the number of the second one. Texts become twice as long as soon as the loss is
small. Attention is sparse as soon as texts are longer than `dense_len`.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from corpus import encode
from directory import add_out_arguments, check_out
from model import Target, minicpm_config, new_minicpm
from sparse import chosen_blocks, queries_and_keys, set_rule
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from torch.utils.data import IterableDataset
from train_lm import write_model
from train_tokenizer import SPECIAL_TOKENS, SPLIT_PATTERN, write_tokenizer
from trainer import TrainConfig, autocast, stop_on_signals, train

from cpmcu.benchmarks.needle_text import DIGITS, FILLER, NAMES, statement

RULE = {"init_blocks": 1, "window_size": 256, "topk": 16, "dense_len": 512}
SPARSE_CONFIG = {
    "kernel_size": 32,
    "kernel_stride": 16,
    "block_size": 64,
    "use_nope": False,
    **RULE,
}
SHORTEST = 64  # tokens of the first texts
REPEATED = 256  # tokens of the longest texts among which some have repeated parts
GAP = 4  # tokens between two statements of a training text, at least on average
TOLD = DIGITS + 1  # tokens after the name
IGNORED = -100  # a target that adds no loss
LEARNED = 0.15  # loss at which texts become longer


def word_tokenizer() -> Tokenizer:
    """A token for each byte, and for each word and digit of the texts with the space before it."""
    # Byte-level BPE writes the space as U+0120.
    words = [f"\u0120{word}" for word in (*NAMES, *FILLER, *map(str, range(10)))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet, *words]
    pattern = SPLIT_PATTERN.replace(r"|\p{N}", r"| ?\p{N}")  # a digit may have a space before it
    # ignore_merges: a whole word is looked up before its bytes.
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer


class Texts(IterableDataset):
    """Batches of texts in which each statement comes twice. Targets are the second numbers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: TrainConfig,
        device: torch.device,
        tokens_per_name: int,
    ) -> None:
        def ids(texts: tuple[str, ...]) -> Tensor:
            return torch.tensor(encode(tokenizer, texts), device=device).squeeze(1)

        self.config, self.device, self.tokens_per_name = config, device, tokens_per_name
        self.names = ids(tuple(f" {name}" for name in NAMES))
        self.filler = ids(tuple(f" {word}" for word in FILLER))
        self.digits = ids(tuple("0123456789"))
        self.first = ids(tuple(f" {n}" for n in range(10)))  # digit of a number
        self.form = ids((statement(NAMES[0], "0" * DIGITS),)).flatten()  # name, digits, point
        self.generator = torch.Generator(device).manual_seed(config.seed)
        self.choice = random.Random(config.seed)
        self.length = self.longest = config.seq_len

    def random(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def draw(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Returns `count` texts of `length` tokens, and their targets."""
        width = len(self.form)
        slots = (length - 1) // (width + GAP)
        names = self.names[: length // self.tokens_per_name]
        pairs = min(slots // 2, len(names))
        places = self.random(count, slots).argsort(1)[:, : 2 * pairs].view(count, pairs, 2)
        places = 1 + places.sort(-1).values * (width + GAP)
        places += (self.random(count, pairs, 2) * (GAP + 1)).long()
        said = self.form.repeat(count, pairs, 1)
        said[..., 0] = names[self.random(count, len(names)).argsort(1)[:, :pairs]]
        number = (self.random(count, pairs, DIGITS) * 10).long()
        said[..., 1] = self.first[number[..., 0]]
        said[..., 2 : DIGITS + 1] = self.digits[number[..., 1:]]
        ids = self.filler[(self.random(count, length + 1) * len(self.filler)).long()]
        ids[:, 0] = 1
        targets = torch.full_like(ids, IGNORED)
        index = places[..., None] + torch.arange(width, device=self.device)
        ids.scatter_(1, index.flatten(1), said[:, :, None].expand(-1, -1, 2, -1).flatten(1))
        targets.scatter_(1, index[:, :, 1, -TOLD:].flatten(1), said[..., -TOLD:].flatten(1))
        return ids[:, :-1], targets[:, 1:]

    def draw_repeated(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """`count` texts of random tokens, and their targets: a part that comes a second time."""
        words = torch.cat([self.names, self.filler, self.digits, self.first])
        ids = words[(self.random(count, length + 1) * len(words)).long()]
        ids[:, 0] = 1
        part = length // 2 - self.choice.randrange(length // 4)
        begin = 1 + (self.random(count, 1) * (length + 1 - 2 * part)).long()
        gap = (self.random(count, 1) * (length + 2 - 2 * part - begin)).long()
        index = torch.arange(part, device=self.device)
        again = begin + part + gap + index
        ids.scatter_(1, again, ids.gather(1, begin + index))
        targets = torch.full_like(ids, IGNORED)
        targets.scatter_(1, again[:, 1:], ids.gather(1, again[:, 1:]))
        return ids[:, :-1], targets[:, 1:]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Batches of a fixed number of tokens. One in four has shorter texts.

        While texts are short, every second batch has repeated parts: most of their tokens are
        targets, so the model soon learns to look back.
        """
        tokens = self.config.batch_size * self.config.seq_len
        while True:
            length = self.length
            if self.choice.random() < 0.25:
                length = max(SHORTEST, length >> self.choice.randrange(8))
            repeated = self.length <= REPEATED and self.choice.random() < 0.5
            draw = self.draw_repeated if repeated else self.draw
            inputs, targets = draw(tokens // length, length)
            yield {"input_ids": inputs, "labels": targets}


@torch.no_grad()
def start_alike(model: Target, share: float) -> None:
    """Makes queries resemble keys: a token then attends to similar ones before any training."""
    shape = model.model.config
    rest = (1 - share**2) ** 0.5
    for layer in model.layers:
        q, k = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
        heads = q.view(shape.num_key_value_heads, -1, shape.head_dim, shape.hidden_size)
        keys = k.view(shape.num_key_value_heads, 1, shape.head_dim, shape.hidden_size)
        heads.mul_(rest).add_(share * keys)


class Lessons:
    """The loss of a model. If it is small, `texts` become longer, and attention sparse."""

    def __init__(self, model: Target, texts: Texts) -> None:
        self.model, self.texts = model, texts
        self.recent: list[Tensor] = []
        texts.length = min(SHORTEST, texts.longest)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        value = self.model.loss(ids, targets)
        texts = self.texts
        if texts.length < texts.longest:
            self.recent.append(value.detach())
            if len(self.recent) == 10:
                if float(torch.stack(self.recent).mean()) < LEARNED:
                    texts.length = min(2 * texts.length, texts.longest)
                    set_rule(self.model.model, RULE)  # the rule leaves texts of dense_len dense
                    print(f"texts of {texts.length} tokens", flush=True)
                self.recent.clear()
        return value


@torch.no_grad()
def found(model: Target, texts: Texts, length: int, rule: dict[str, int] | None) -> float:
    """The share of numbers of which all digits are the most likely ones."""
    set_rule(model.model, rule)
    right = total = 0
    for _ in range(max(1, min(8, (1 << 15) // length))):
        ids, targets = texts.draw(1, length)
        with autocast(model.device):
            best = model.model(input_ids=ids, use_cache=False).logits.argmax(-1)
        asked = targets != IGNORED
        hits = (best == targets)[asked].view(-1, TOLD)
        right += int(hits.all(1).sum())
        total += len(hits)
    return right / total


@torch.no_grad()
def agreement(model: Target, texts: Texts, length: int, rule: dict[str, int]) -> float:
    """The share of chosen blocks that the checkpoints' own normaliser chooses, too."""
    same = total = 0
    tokens = torch.arange(length, device=model.device)
    blocks = torch.arange(-(-length // 64), device=model.device)
    between = (blocks >= rule["init_blocks"]) & (
        blocks <= (tokens // 64)[:, None] - rule["window_size"] // 64
    )
    between &= (tokens >= rule["dense_len"])[:, None]
    ids, _ = texts.draw(1, length)
    for q, k in queries_and_keys(model.model, ids, rule):
        ours, theirs = (
            chosen_blocks(q, k, rule, q.shape[-1] ** -0.5, own) & between for own in (False, True)
        )
        same += int((ours & theirs).sum())
        total += int(ours.sum())
    return same / total


def card(name: str, model: Target, config: TrainConfig, minutes: float, hardware: str) -> str:
    shape = model.model.config
    return f"""# {name}

A small MiniCPM-architecture model that finds numbers in long texts: \
{model.model.num_parameters() / 1e6:.2f} M parameters,
{shape.num_hidden_layers} layers, hidden size {shape.hidden_size}, \
{shape.num_attention_heads} query and {shape.num_key_value_heads} key/value heads of
{shape.head_dim}, bf16, tied embeddings. Its sparse_config has a window of \
{RULE["window_size"]} tokens and {RULE["topk"]} other blocks.

- Data: random words and statements such as " falcon 4821.", each of them twice, in texts of
  {SHORTEST} to {config.seq_len} tokens.
- Training: {minutes:.1f} minutes on {hardware}; `scripts/train/train_needle.py` in the cpmcu
  repository. Attention is sparse in texts of more than {RULE["dense_len"]} tokens.

`python -m cpmcu.bench --needle` asks it. It knows no other words.
"""


def write(
    out: Path,
    model: Target,
    tokenizer: Tokenizer,
    config: TrainConfig,
    minutes: float,
    hardware: str,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(tokenizer, Path(folder), model.source["max_position_embeddings"])
        about = card(out.name, model, config, minutes, hardware)
        write_model(model, Path(folder), out, about, {"do_sample": False})


def report(model: Target, texts: Texts, length: int) -> None:
    shares = [found(model, texts, length, rule) for rule in (None, RULE)]
    print(f"{length} tokens: found dense {shares[0]:.3f}, sparse {shares[1]:.3f}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_out_arguments(parser)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--longest", type=int, default=8192, help="tokens of the longest texts")
    parser.add_argument("--batch-tokens", type=int, default=1 << 16)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--max-minutes", type=float, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--rope-theta", type=float, default=1e6)
    parser.add_argument("--alike", type=float, default=0.7, help="see start_alike")
    parser.add_argument("--tokens-per-name", type=int, default=8, help="of the texts' names")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    check_out(args)
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    tokenizer = word_tokenizer()
    source = minicpm_config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=args.hidden_size,
        num_hidden_layers=args.layers,
        intermediate_size=2 * args.hidden_size,
        max_position_embeddings=1 << 17,
        rope_theta=args.rope_theta,
        sparse_config=SPARSE_CONFIG,
    )
    model = new_minicpm(source, args.seed)
    start_alike(model, args.alike)
    model.model.to(device)
    set_rule(model.model, None)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    hardware = f"one {name}" if name else "a CPU"
    print(f"{model.model.num_parameters() / 1e6:.2f} M parameters on {hardware}", flush=True)
    config = TrainConfig(
        steps=args.steps,
        max_minutes=args.max_minutes,
        batch_size=max(1, args.batch_tokens // args.longest),
        seq_len=args.longest,
        learning_rate=args.learning_rate,
        final_learning_rate=args.learning_rate / 30,
        warmup_steps=100,
        weight_decay=0.01,
        seed=args.seed,
    )
    texts = Texts(tokenizer, config, device, args.tokens_per_name)
    lessons = Lessons(model, texts)
    stop = stop_on_signals()
    minutes = train(model.model, lessons.loss, texts, None, config, should_stop=stop).minutes
    write(args.out, model, tokenizer, config, minutes, hardware)
    for length in (1024, 2048, 4096, 8192, 16384):
        if length <= args.longest:
            report(model, texts, length)
    same = agreement(model, texts, min(8192, args.longest), RULE)
    print(f"chosen blocks equal to those of the checkpoints' own rule: {same:.4f}", flush=True)


if __name__ == "__main__":
    main()
