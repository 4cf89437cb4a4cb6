"""Texts of the needle check: numbers of names between filler words.

    ... night paper falcon 4821. window quiet ...        a statement
    ... stone falcon                                     its question; the answer is 4821

A text holds a statement for each of many names, so an answer needs the right one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_NAMES = """
albatross alligator antelope armadillo baboon badger barracuda beaver bison bobcat buffalo butterfly
camel caribou catfish centipede chameleon cheetah chipmunk cobra condor cormorant cougar coyote
crane cricket crocodile cuckoo dingo dolphin donkey dragonfly eagle egret elephant falcon ferret
finch firefly flamingo gazelle gecko gerbil giraffe goose gopher gorilla grasshopper grizzly hamster
hawk hedgehog heron herring hippo hornet hyena ibex iguana impala jackal jaguar jellyfish kangaroo
kingfisher kiwi koala lemming lemur leopard lizard llama lobster lynx macaw mackerel magpie manatee
mantis marmot meerkat mongoose moose mosquito muskrat narwhal newt nightingale ocelot octopus
opossum orca oriole osprey ostrich otter owl panda panther parrot partridge peacock pelican penguin
pheasant piranha platypus porcupine possum puffin puma quail rabbit raccoon raven rooster salamander
salmon scorpion seahorse skunk sparrow squid
"""
_FILLER = """
about above across after again air along among answer around ask away back before begin between book
both bring build call change city close cold come country cover cross day door down draw drive early
earth enough evening every face family far field find first floor follow forest found garden give
glass good grass great green ground grow half hand hard head hear high hill home hour house idea
island keep kind lake land large last late leaf learn leave letter light line little live long look
make many map market middle minute month morning mountain music near never night north number often
old open orange other page paper part pass people picture place plant point quiet rain
"""
NAMES = tuple(_NAMES.split())
FILLER = tuple(_FILLER.split())
DIGITS = 4  # digits of a hidden number


@dataclass(frozen=True)
class NeedleText:
    """One text with its questions."""

    ids: list[int]  # token ids of the text
    # For each depth, the token ids of the question that follows the text.
    questions: list[list[int]]
    answers: list[str]


def statement(name: str, number: str) -> str:
    """Returns the sentence that gives a name its number, for insertion after a word."""
    return f" {name} {number}."


def make_text(
    encode: Callable[[str], list[int]],
    begin: list[int],
    length: int,
    num_depths: int,
    rng: np.random.Generator,
) -> NeedleText:
    """A text that has `length` tokens together with a question, or less than a word fewer.

    The statement of question i is at (i + 1/2) / num_depths of the text. Statements of other names
    are at random places, about one in 128 tokens.

    `begin`: tokens before every text. Raises ValueError if the statements do not fit.
    """
    others = min(length // 128, len(NAMES) - num_depths)
    names = rng.permutation(NAMES)[: num_depths + others].tolist()
    numbers = [f"{n:0{DIGITS}}" for n in rng.integers(10**DIGITS, size=len(names))]
    depths = [(i + 0.5) / num_depths for i in range(num_depths)]
    depths += rng.random(others).tolist()
    said = [encode(statement(*pair)) for pair in zip(names, numbers)]
    questions = [encode(f" {name}") for name in names[:num_depths]]
    room = length - len(begin) - sum(map(len, said)) - max(map(len, questions))
    if room < length // 4:
        raise ValueError(
            f"the context has {length} tokens, too few for {len(names)} statements, expected more"
        )
    words = [encode(f" {word}") for word in FILLER]
    order = np.argsort(depths, kind="stable")
    ids, filled = list(begin), 0  # the ids so far, and how many of them are filler
    for i in order:
        while filled < depths[i] * room:
            word = words[rng.integers(len(words))]
            ids += word
            filled += len(word)
        ids += said[i]
    while True:
        word = words[rng.integers(len(words))]
        if filled + len(word) > room:
            return NeedleText(ids, questions, numbers[:num_depths])
        ids += word
        filled += len(word)
