"""Lets a chat model write conversations: training data of draft heads, without a data set.

    python scripts/train/chat_text.py --target DIR --out FOLDER

After the beginning of a user's turn, a chat model continues with a user's message: the method of
Magpie (Xu et al., 2024, arXiv 2406.08464). The model then answers, and some conversations get a
second message. The folder has `tokens.npy`, int32 [windows, length], for `train_head.py
--generated`, and `held_out/*.txt`, rendered conversations that are in no window, for `--text`.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from directory import add_out_arguments, check_out

from cpmcu import LLM, SamplingParams
from cpmcu.convert.output import new_directory

_MARK = "MESSAGE"  # stands for a message, to cut the rendered template at it


@dataclass(slots=True)
class Conversation:
    """Turns of user and assistant, and the token ids of the whole."""

    messages: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


def user_prefix(llm: LLM, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a conversation up to the beginning of the next user message."""
    template = llm.chat_template
    if template is None:
        raise SystemExit(f"{llm.directory} has no chat template, expected a chat model")
    turns = [*messages, {"role": "user", "content": _MARK}]
    return llm.tokenizer.encode(template.render(turns).split(_MARK)[0], add_special_tokens=False)


def write_messages(
    llm: LLM, conversations: Sequence[Conversation], tokens: int, seed: int
) -> list[Conversation]:
    """Adds a user message to each conversation; returns those whose message ended in time."""
    prompts = [user_prefix(llm, each.messages) for each in conversations]
    params = [
        SamplingParams(temperature=1.0, top_p=0.95, seed=seed + index, max_tokens=tokens)
        for index in range(len(prompts))
    ]
    written = []
    for each, output in zip(conversations, llm.generate(prompts, params), strict=True):
        text = output.text.strip()
        if output.outputs[0].finish_reason == "stop" and len(text) > 8:
            each.messages.append({"role": "user", "content": text})
            written.append(each)
    return written


def write_answers(
    llm: LLM,
    conversations: Sequence[Conversation],
    tokens: int,
    temperatures: Sequence[float],
    seed: int,
) -> None:
    """Adds the model's answer to each conversation, and sets its `ids`."""
    prompts = [llm.tokenize_chat(each.messages) for each in conversations]
    params = [
        SamplingParams(
            temperature=temperatures[index % len(temperatures)],
            seed=seed + index,
            max_tokens=tokens,
        )
        for index in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params)
    for each, prompt, output in zip(conversations, prompts, outputs, strict=True):
        answer = output.outputs[0]
        each.messages.append({"role": "assistant", "content": answer.text})
        each.ids = [*prompt, *answer.token_ids]


def windows(sequences: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Concatenates token ids and cuts them: int32 [windows, length], without the last part."""
    whole = np.fromiter((token for ids in sequences for token in ids), dtype=np.int32)
    count = len(whole) // length
    return whole[: count * length].reshape(count, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True, help="chat model: directory or repository id")
    add_out_arguments(parser)
    parser.add_argument("--conversations", type=int, default=30_000)
    parser.add_argument("--held-out", type=int, default=200, help="conversations kept as text")
    parser.add_argument(
        "--second-turn", type=float, default=0.2, help="share of conversations with two messages"
    )
    parser.add_argument("--message-tokens", type=int, default=96, help="most tokens of a message")
    parser.add_argument("--answer-tokens", type=int, default=400, help="most tokens of an answer")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.0, 0.7, 1.0])
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    check_out(args, holds="tokens.npy")
    begin = time.perf_counter()
    with LLM(args.target, max_num_seqs=args.max_num_seqs, max_model_len=2048) as llm:
        started = write_messages(
            llm,
            [Conversation() for _ in range(args.conversations)],
            args.message_tokens,
            args.seed,
        )
        distinct = list({each.messages[0]["content"]: each for each in started}.values())
        print(
            f"{len(distinct)} different messages, {time.perf_counter() - begin:.0f} s", flush=True
        )
        write_answers(llm, distinct, args.answer_tokens, args.temperatures, args.seed)
        longer = random.Random(args.seed).sample(distinct, round(len(distinct) * args.second_turn))
        longer = write_messages(llm, longer, args.message_tokens, args.seed + args.conversations)
        write_answers(llm, longer, args.answer_tokens, args.temperatures, args.seed)
        seconds = time.perf_counter() - begin
        held_out, rest = distinct[: args.held_out], distinct[args.held_out :]
        rows = windows([each.ids for each in rest], args.length)
        with new_directory(args.out) as directory:
            np.save(directory / "tokens.npy", rows)
            (directory / "held_out").mkdir()
            for index, each in enumerate(held_out):
                text = llm.tokenizer.decode(each.ids, skip_special_tokens=False)
                (directory / "held_out" / f"{index}.txt").write_text(text, encoding="utf-8")
    print(f"{rows.size / 1e6:.2f} M tokens, {seconds:.0f} s, written to {args.out}", flush=True)


if __name__ == "__main__":
    main()
