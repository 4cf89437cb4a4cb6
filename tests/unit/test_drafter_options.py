"""A drafter from outside with options of its own, and shapes that no tree of EAGLE-2's kind has.

The options become flags and keys of --speculative-config. The drafter is tests/plugins/
comb_drafter.cpp.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cpmcu.cli import _configs, make_parser
from cpmcu.config import EngineConfig, SpeculativeConfig
from cpmcu.drafters.options import DrafterOptions, register_options
from cpmcu.drafters.options.trees import TreeOptions, TreeShape
from cpmcu.drafters.registry import (
    DraftFiles,
    DraftPlan,
    TargetModel,
    Tensors,
    register_drafter,
)
from cpmcu.engine.chooser import ShapeChooser
from cpmcu.loading.loader import load_model
from cpmcu.options import option
from tests.engine.drafted import Drive
from tests.engine.harness import generate, make_engine, random_ids
from tests.reference.tiny_checkpoints import random_weights, tiny_config
from tests.unit.plugins import VOCAB, load_plugin, write_model

MOST = 15  # maximum number of levels


@register_options("comb")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CombOptions(DrafterOptions):
    """Options of a comb."""

    comb_levels: int = option(
        3,
        "levels of a comb",
        keys={"levels": None},
        least=1,
        most=MOST,
        fixes_shape=True,
    )
    comb_width: int = option(2, "tokens of each level", least=1, most=8, fixes_shape=True)

    def __post_init__(self) -> None:
        if self.comb_levels * self.comb_width > 63:
            raise ValueError(
                f"comb_levels {self.comb_levels} x comb_width {self.comb_width} is more than 63"
            )


@register_drafter("comb")
class Comb:
    """A spine of repetitions with leaves beside it."""

    has_checkpoint = False

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        return False

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        given = speculation.of(CombOptions)
        levels, width = given.comb_levels, given.comb_width
        shape = TreeShape(levels, width, 1 + levels * width)
        return DraftPlan(shape=shape, options={"width": width})


@pytest.fixture(scope="module")
def comb_plugin(tmp_path_factory: pytest.TempPathFactory) -> None:
    load_plugin("comb_drafter", tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, comb_plugin: None) -> Path:
    config = tiny_config("llama", vocab_size=VOCAB)
    directory = tmp_path_factory.mktemp("comb") / "model"
    return write_model(directory, config, random_weights(config))


def test_flags_and_keys() -> None:
    parser = make_parser()
    assert "--comb-width N" in parser.format_full_help()
    arguments = ["--spec-method", "comb", "--comb-width", "4", "--comb_levels=2"]
    read = _configs(parser, parser.parse_args(arguments))[1].speculation
    assert read == SpeculativeConfig(method="comb", comb_width=4, comb_levels=2)
    assert read.of(CombOptions) == CombOptions(comb_levels=2, comb_width=4)
    assert not read.chooses_shapes and SpeculativeConfig(method="comb").chooses_shapes
    text = '{"method": "comb", "levels": 2, "comb_width": 4}'
    assert EngineConfig(speculative_config=text).speculation == read
    assert SpeculativeConfig.from_mapping(dataclasses.asdict(read)) == read
    assert dataclasses.replace(read, comb_width=5).of(CombOptions).comb_width == 5
    assert read.but(comb_width=2) == SpeculativeConfig(method="comb", comb_levels=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"comb_width": 9}, "comb_width is 9, but must be at most 8"),
        ({"levels": 0}, "comb_levels is 0, but must be at least 1"),
        ({"comb_width": "4"}, "comb_width is '4', expected int"),
        ({"levels": 9, "comb_width": 8}, "comb_levels 9 x comb_width 8 is more than 63"),
        ({"levels": 2, "comb_levels": 2}, "also sets comb_levels by comb_levels: give it once"),
        ({"comb_size": 2}, "has 'comb_size', expected only method"),
    ],
)
def test_wrong_options(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.from_mapping({"method": "comb", **fields})


def test_options_of_another_drafter(model: Path) -> None:
    for given, name, value, kind in (
        ({"method": "ngram", "comb_width": 4}, "comb_width", 4, "ngram"),
        ({"method": "comb", "spec_num_iter": 4}, "spec_num_iter", 4, "comb"),
    ):
        message = f"{name} is {value}, expected none for a draft of kind {kind}"
        with pytest.raises(ValueError, match=message):
            make_engine(model, speculative_config=SpeculativeConfig(**given))
    with pytest.raises(TypeError, match="has no option 'comb_depth'"):
        SpeculativeConfig(comb_depth=3)


def test_an_option_is_declared_once() -> None:
    message = "the option 'spec_num_iter' of drafter 'other' is one of TreeOptions, too"
    with pytest.raises(ValueError, match=message):

        @register_options("other")
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class OtherOptions(DrafterOptions):
            spec_num_iter: int = option(3, "another meaning")

    assert SpeculativeConfig(spec_num_iter=3).of(TreeOptions).spec_num_iter == 3


def test_the_text_is_exact_with_every_shape(model: Path) -> None:
    plain = make_engine(model)
    speculation = SpeculativeConfig(method="comb", comb_width=3)
    comb = make_engine(model, speculative_config=speculation)
    shapes = comb.draft_shapes
    assert shapes == [(0, 1), (1, 4), (2, 7), (3, 10)]
    ids = random_ids(12, VOCAB)
    for fields in ({}, {"temperature": 1.0, "seed": 7}, {"logit_bias": [(5, 8.0)], "seed": 2}):
        expected = generate(plain, ids, 40, **fields)[:40]
        for shape in shapes:
            drive = Drive(comb, shapes=lambda shape=shape: shape)
            assert drive.one(ids, 40, **fields) == expected, shape
        mixed = itertools.cycle(shapes)
        assert (
            Drive(comb, shapes=lambda mixed=mixed: next(mixed)).one(ids, 40, **fields) == expected
        )
    drive = Drive(comb)
    assert drive.one(ids, 41, logit_bias=[(5, 100.0)]) == [5] * 41
    assert max(drive.emitted) == 4  # the spine
    message = 'within it the drafter "comb" drafts at most depth 2 and 7 nodes'
    with pytest.raises(ValueError, match=message):
        Drive(comb, shapes=lambda: (2, 8)).one(ids, 5)


def test_the_chooser_has_the_shapes_of_the_drafter(model: Path) -> None:
    """Steps choose only combs, and a whole draft if it pays."""
    config = EngineConfig(device="cpu", speculative_config=SpeculativeConfig(method="comb"))
    loaded = load_model(str(model), config=config)
    assert loaded.shapes == ((0, 1), (1, 3), (2, 5), (3, 7))
    chooser = ShapeChooser(loaded.shapes)
    chosen = set()
    for _ in range(400):
        shape = chooser.choose(1)
        chooser.observe(shape, 1, 1.0 + 0.01 * shape[1], [1 + shape[0]])
        chosen.add(shape)
    assert chosen <= set(loaded.shapes) and shape == (3, 7)


def test_a_comb_is_filled_from_the_context(model: Path) -> None:
    """An addition works on drafts of any kind; its part is made smaller by the part's own rule."""
    plain = make_engine(model)
    filled = make_engine(
        model,
        speculative_config=SpeculativeConfig(method="comb", comb_width=3, fill="ngram"),
    )
    ids = random_ids(10, VOCAB) * 3
    for fields in ({}, {"temperature": 1.0, "seed": 7}):
        expected = generate(plain, ids, 40, **fields)[:40]
        for shape in filled.draft_shapes[1:]:
            assert (
                Drive(filled, shapes=lambda shape=shape: shape).one(ids, 40, **fields) == expected
            )
