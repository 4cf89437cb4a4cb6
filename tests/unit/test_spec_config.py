"""SpeculativeConfig: flags, vLLM's JSON, and impossible tree shapes."""

from __future__ import annotations

import dataclasses

import pytest

from cpmcu.cli import _configs, make_parser
from cpmcu.config import EngineConfig, SpeculativeConfig
from cpmcu.drafters.options.fill import FillOptions
from cpmcu.drafters.options.ngram import NgramOptions
from cpmcu.drafters.options.trees import (
    CHAIN_DEPTH,
    CHOSEN_SHAPE,
    HEAD_SHAPE,
    MAX_TREE_SIZE,
    SHIPPED_SHAPE,
    TreeOptions,
    TreeShape,
)


def from_command_line(*arguments: str) -> SpeculativeConfig:
    parser = make_parser()
    return _configs(parser, parser.parse_args(list(arguments)))[1].speculation


def test_defaults():
    config = EngineConfig().speculation
    assert config == SpeculativeConfig()
    trees = config.of(TreeOptions)
    assert trees.tree() == TreeShape(2, 10, 12)
    assert trees.tree(SHIPPED_SHAPE) == SHIPPED_SHAPE
    assert trees.chain(CHAIN_DEPTH) == TreeShape(4, 1, 5)
    assert config.of(NgramOptions).ngram_range == (1, 4)


def test_flags():
    config = from_command_line(
        *("--draft-model-path", "d", "--frspec_path", "f", "--frspec-vocab-size", "100"),
        *("--spec-num-iter", "3", "--spec_topk_per_iter=4", "--spec-tree-size", "12"),
        *("--spec-window-size", "64", "--use-eagle3"),
    )
    assert config == SpeculativeConfig(
        draft_model_path="d",
        frspec_path="f",
        frspec_vocab_size=100,
        spec_num_iter=3,
        spec_topk_per_iter=4,
        spec_tree_size=12,
        spec_window_size=64,
        use_eagle3=True,
    )
    assert from_command_line("--no-speculation").no_speculation
    assert from_command_line("--use-eagle3", "no").options == {"use_eagle3": False}


def test_json():
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}'
    config = from_command_line("--speculative-config", text)
    options = config.of(NgramOptions)
    assert (config.method, options.ngram_range) == ("ngram", (1, 3))
    assert options.chain(CHAIN_DEPTH) == TreeShape(5, 1, 6)
    text = '{"method": "eagle3", "model": "d", "num_speculative_tokens": 3}'
    config = EngineConfig(speculative_config=text).speculation
    assert config.draft_model_path == "d"
    assert config.of(TreeOptions).tree() == TreeShape(3, 1, 4)
    mixed = from_command_line("--speculative-config", text, "--spec-window-size", "9")
    assert mixed == dataclasses.replace(config, spec_window_size=9)
    sized = SpeculativeConfig.from_mapping({"model": "d", "spec_tree_size": 8})
    assert sized.of(TreeOptions).spec_tree_size == 8


def test_fill():
    config = from_command_line("--draft-model-path", "d", "--spec-fill", "ngram")
    assert config == SpeculativeConfig(draft_model_path="d", fill="ngram")
    assert config.chooses_shapes and config.of(FillOptions).ngram_range == (1, 16)

    def shape(defaults: TreeShape = HEAD_SHAPE, chain: bool = False, **given: int) -> TreeShape:
        return SpeculativeConfig(fill="ngram", **given).of(FillOptions).shape(defaults, chain=chain)

    assert shape(CHOSEN_SHAPE) == TreeShape(9, 8, 32)
    assert shape(spec_topk_per_iter=16) == TreeShape(5, 16, 12)
    assert shape(spec_num_iter=3).depth == 3
    assert shape(chain=True) == TreeShape(9, 1, 10)


def test_fastdeploys_hybrid_form():
    text = (
        '{"method": "mtp", "mtp_strategy": "with_ngram", "num_model_steps": 3, '
        '"num_speculative_tokens": 5, "max_ngram_size": 6, "min_ngram_size": 2}'
    )
    config = from_command_line("--speculative-config", text)
    options = config.of(FillOptions)
    assert (config.method, options.fill, options.num_model_steps) == ("mtp", "ngram", 3)
    assert options.tree() == TreeShape(5, 1, 6) and options.ngram_range == (2, 6)
    plain = from_command_line("--speculative-config", text.replace("with_ngram", "default").replace(
        '"num_model_steps": 3', '"num_model_steps": 5'
    ))  # fmt: skip
    assert plain.of(FillOptions).fill is None


def test_json_round_trip_through_asdict():
    config = EngineConfig(speculative_config=SpeculativeConfig(draft_model_path="d"))
    fields = dataclasses.asdict(config)["speculative_config"]
    assert SpeculativeConfig.from_mapping(fields) == config.speculation


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"methud": "ngram", "tokens": 3}', "has 'methud', 'tokens', expected only method, model"),
        ("[1]", r"is \[1\], expected a JSON object"),
        ("ngram", "is not JSON"),
        ('{"num_speculative_tokens": "3"}', "num_speculative_tokens is '3', expected int"),
        ('{"model": 3}', "model is 3, expected str"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "spec_num_iter is 0"),
        ('{"prompt_lookup_min": 5, "prompt_lookup_max": 2}', "prompt_lookup_min is 5"),
        ('{"prompt_lookup_max": 33}', "prompt_lookup_max is 33, but must be at most 32"),
        ('{"prompt_lookup_min": 40}', "prompt_lookup_min is 40, but must be at most 32"),
        ('{"mtp_strategy": "hybrid"}', "mtp_strategy is 'hybrid', expected one of: default, with"),
        ('{"mtp_strategy": 1}', "mtp_strategy is 1, expected one of"),
        ('{"fill": "suffix"}', "fill is 'suffix', but must be one of ngram"),
        ('{"mtp_strategy": "default", "fill": "ngram"}', "also sets fill by fill: give it once"),
        ('{"method": "ngram", "fill": "ngram"}', "fill and method are both 'ngram', expected the"),
        ('{"num_model_steps": 3}', "must equal spec_num_iter, which is not given: give"),
        (
            '{"fill": "ngram", "num_model_steps": 6, "num_speculative_tokens": 5}',
            "num_model_steps is 6, but must be at most spec_num_iter, which is 5",
        ),
    ],
)
def test_wrong_json(text, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(speculative_config=text)


def test_a_field_given_twice():
    with pytest.raises(ValueError, match="also sets spec_num_iter: give it once"):
        SpeculativeConfig.from_json('{"num_speculative_tokens": 3}', spec_num_iter=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"spec_tree_size": 65}, "spec_tree_size is 65, but must be at most 64"),
        ({"spec_num_iter": 17}, "spec_num_iter is 17, but must be at most 16"),
        ({"spec_topk_per_iter": 33}, "spec_topk_per_iter is 33, but must be at most 32"),
        (
            {"spec_num_iter": 5, "spec_topk_per_iter": 17},
            r"spec_topk_per_iter 17 x \(spec_num_iter 5 - 1\) is 68, but must be at most 64",
        ),
        (
            {"spec_num_iter": 2, "spec_topk_per_iter": 2, "spec_tree_size": 12},
            "spec_tree_size is 12, but .* draft only 6 tokens: at most 7",
        ),
        ({"method": "ngram", "spec_tree_size": 12}, "spec_tree_size is 12, but a chain of 4"),
        ({"method": "ngram", "spec_topk_per_iter": 2}, "spec_topk_per_iter is 2, but a chain"),
        ({"method": "eagle", "use_eagle3": True}, "use_eagle3 is set, but method is 'eagle'"),
        ({"spec_tree_size": 0}, "spec_tree_size is 0, but must be at least 1"),
        ({"frspec_vocab_size": -1}, "frspec_vocab_size is -1"),
        ({"spec_window_size": -1}, "spec_window_size is -1"),
        ({"spec_auto": "no"}, "spec_auto is 'no', but must be True or False"),
        ({"no_speculation": "no"}, "no_speculation is 'no', but must be True or False"),
        ({"per_request_spec_decode_metrics": "all"}, "must be one of none, summary, detailed"),
    ],
)
def test_impossible(fields, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**fields)


@pytest.mark.parametrize("depth", range(1, 17))
def test_every_depth_has_a_tree_by_default(depth):
    shape = SpeculativeConfig(spec_num_iter=depth).of(TreeOptions).tree()
    assert shape.depth == depth
    assert shape.topk * (depth - 1) <= MAX_TREE_SIZE
    assert shape.tree_size - 1 <= shape.topk + (depth - 1) * shape.topk**2


def test_the_limits_are_those_of_the_extension():
    C = pytest.importorskip("cpmcu.C")
    assert C.MAX_TREE_SIZE == MAX_TREE_SIZE


def test_verify_strategies():
    assert SpeculativeConfig().verify_strategy == "target_match"
    text = '{"method": "mtp", "verify_strategy": "topp", "verify_window": 3}'
    config = from_command_line("--speculative-config", text)
    assert (config.verify_strategy, config.verify_window) == ("topp", 3)
    assert from_command_line("--verify-strategy", "greedy").verify_strategy == "greedy"
    assert config.strategy == "topp"
    assert dataclasses.replace(config, no_speculation=True).strategy == "target_match"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"verify_strategy": "top-p"}, "verify_strategy is 'top-p', but must be one of target_m"),
        ({"verify_strategy": "topp", "verify_window": -1}, "verify_window is -1, but must be 0 to"),
        ({"verify_strategy": "topp", "verify_window": 17}, "verify_window is 17, but must be 0 to"),
        ({"verify_window": 2}, "verify_window is 2, but only verify_strategy 'topp' has one; ver"),
        ({"verify_strategy": 1}, "speculative_config: verify_strategy is 1, expected str"),
        ({"verify_strategy": "topp", "verify_window": 1.5}, "verify_window is 1.5, expected int"),
    ],
)
def test_wrong_verify_strategies(fields, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.from_mapping(fields)


def test_the_help_names_lossy_strategies():
    parser = make_parser()
    for text in (parser.format_help(), parser.format_full_help()):
        assert "--verify-strategy" in text and "LOSSY" in text.split("--verify-strategy", 1)[1]


def test_the_kind_of_a_named_draft_decides_which_shapes_exist() -> None:
    """A block drafter has 31 nodes of two candidates at four positions, an EAGLE head 14."""
    shape = {"spec_num_iter": 4, "spec_topk_per_iter": 2, "spec_tree_size": 20}
    assert SpeculativeConfig(draft_model_path="draft", **shape).options == shape
    SpeculativeConfig(method="dspark", draft_model_path="draft", **shape)
    for named in ({}, {"method": "eagle", "draft_model_path": "draft"}):
        with pytest.raises(ValueError, match=r"spec_tree_size is 20, but .* at most 15"):
            SpeculativeConfig(**named, **shape)
