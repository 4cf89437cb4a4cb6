"""Flags made from dataclass fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from cpmcu import bench, server
from cpmcu.cli import make_parser
from cpmcu.config import EngineConfig, option
from cpmcu.flags import FlagParser, add_flags, from_flags
from cpmcu.flags.engine import engine_config, without_hits
from cpmcu.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    model_name: str | None = option(None, "a name", flags=("--model-name", "--name"))
    graph: bool = option(True, "a switch")
    maybe: bool | None = option(None, "a switch that knows when it was not given")
    share: float = option(0.9, "100% is 1")
    words: Sequence[str] = option((), "several")
    kind: str = option("a", "one of two", choices=("a", "b"))
    hidden: int = option(3, "no flag", flags=())


def parse(*arguments: str) -> Toy:
    parser = FlagParser(prog="toy")
    add_flags(parser, Toy, "toy")
    return from_flags(Toy, parser.parse_args(list(arguments)))


def test_defaults():
    assert parse() == Toy()


@pytest.mark.parametrize("text", ["yes", "true", "1", "True", "on"])
def test_true(text):
    assert parse("--graph", text).graph is True
    assert parse(f"--maybe={text}").maybe is True


@pytest.mark.parametrize("text", ["no", "false", "0", "False", "off"])
def test_false(text):
    assert parse("--graph", text).graph is False
    assert parse(f"--maybe={text}").maybe is False


def test_forms():
    assert parse("--maybe").maybe is True
    assert parse("--model_name", "x_y").model_name == "x_y"
    assert parse("--model_name=a_b").model_name == "a_b"
    assert parse("--name", "x").model_name == "x"
    assert tuple(parse("--words", "a", "--words", "b").words) == ("a", "b")
    assert parse("--share", "0.5").share == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--graph", "perhaps"], "expected yes or no, found 'perhaps'"),
        (["--modelname", "x"], "unknown flag '--modelname'; did you mean --model-name?"),
        (["--gra"], "unknown flag '--gra'"),
        (["word"], "unexpected argument 'word'"),
        (["--share", "x"], "--share"),
        (["--kind", "c"], "--kind"),
        (["--hidden", "1"], "unknown flag '--hidden'"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(*arguments)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


CPMCU_FLAGS = (
    "--prompt-file p --prompt-text t --use-chat-template no --use-stream false --num-generate 5 "
    "--temperature 0.5 --random-seed 3 --ignore-eos --model-path m --model-type auto "
    "--dtype bfloat16 --minicpm4-yarn true --cuda-graph 0 --memory-limit 0.5 --chunk-length 64 "
    "--plain-output"
)


@pytest.mark.parametrize("underscores", [False, True])
def test_the_flags_of_cpm_cu_work(underscores):
    arguments = CPMCU_FLAGS.split()
    if underscores:
        arguments = ["--" + a[2:].replace("-", "_") if a[:2] == "--" else a for a in arguments]
    parsed = make_parser().parse_args(arguments)
    config, params = from_flags(EngineConfig, parsed), from_flags(SamplingParams, parsed)
    assert (config.model, config.dtype, config.cuda_graph) == ("m", "bfloat16", False)
    assert (config.memory_limit, config.chunk_length, config.minicpm4_yarn) == (0.5, 64, True)
    assert (params.temperature, params.seed, params.ignore_eos) == (0.5, 3, True)
    assert params.max_tokens == 5
    assert make_parser().parse_args(["--temp", "1"]).temperature == 1.0


def test_short_flags():
    parsed = make_parser("run").parse_args(["-n", "5", "-m", "DIR", "-p", "a b", "--", "-n"])
    assert (parsed.max_tokens, parsed.model, parsed.prompt_text) == (5, "DIR", ["a b"])
    assert parsed.plain_words == ["-n"]
    assert make_parser().parse_args(["-n5", "-mDIR"]).max_tokens == 5
    for program, verb in ((server, "serve"), (bench, "bench")):
        assert program.make_parser(verb).parse_args(["-m", "DIR"]).model == "DIR"
    assert "-n, --num-generate N " in make_parser("chat").format_help()


@pytest.mark.parametrize(
    ("arguments", "message", "named"),
    [
        ([], "max_tokens is 0", "--num-generate is 0"),
        (["-n", "0"], "max_tokens is 0", "-n is 0"),
        (["--max_tokens", "0"], "max_tokens is 0", "--max-tokens is 0"),
        (["--temp=0"], "temperature is -1, but must be", "--temp is -1, but must be"),
        ([], "stop_token_ids[1] is -1", "--stop-token-ids is -1"),
        ([], "stop holds ''", "--stop holds ''"),
        ([], "x: where to stop is not said", "x: where to stop is not said"),
        ([], "model and draft differ", "model and draft differ"),
        ([], "generation_config.json: top_p is 5", "generation_config.json: top_p is 5"),
        (
            ["--spec-num-iter", "2"],
            "spec_topk_per_iter 3 x (spec_num_iter 2 - 1)",
            "--spec-topk-per-iter 3 x (--spec-num-iter 2 - 1)",
        ),
        (
            ["--speculative-config", "{}"],
            "spec_num_iter is 99, but must be at most 16",
            "spec_num_iter is 99, but must be at most 16",
        ),
        ([], "speculative_config: method is 3", "speculative_config: method is 3"),
        (["--max-tokens", "1"], "no max_tokens_here", "no max_tokens_here"),
    ],
)
def test_messages_name_the_flag_that_was_typed(arguments, message, named):
    parser = make_parser()
    parser.parse_args(arguments)
    assert parser.named(message) == named


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", True),
        ("--prefix-cache no", False),
        ("--prefix_cache=no", False),
        ("--enable-prefix-caching", True),
        ("--no-enable-prefix-caching", False),
        ("--no_enable_prefix_caching --enable_prefix_caching", True),
    ],
)
def test_spellings_of_the_prefix_cache(words, expected):
    config = from_flags(EngineConfig, make_parser().parse_args(words.split()))
    assert config.prefix_cache is expected


def test_the_tokens_of_a_pass_have_vllms_name_too():
    for flag in ("--chunk-length", "--max-num-batched-tokens", "--max_num_batched_tokens"):
        config = from_flags(EngineConfig, make_parser().parse_args([flag, "100"]))
        assert config.chunk_length == 100


def test_measurements_are_without_the_prefix_cache():
    parser = make_parser()
    for words in ("", "--prefix-cache no"):
        parsed = parser.parse_args(words.split())
        assert not without_hits(engine_config(parsed), parsed).prefix_cache
    parsed = parser.parse_args(["--prefix-cache"])
    with pytest.raises(ValueError, match="prefix_cache is yes"):
        without_hits(engine_config(parsed), parsed)


def test_engine_config_is_checked():
    wrong = [{"memory_limit": 0}, {"chunk_length": 0}, {"device": "tpu"}, {"dtype": "x"}]
    wrong += [{"max_prefill_ms": 0}, {"max_prefill_ms": float("inf")}]
    wrong += [{"max_num_seqs": 257}, {"swap_space": -1}, {"swap_space": float("nan")}]
    for fields in wrong:
        with pytest.raises(ValueError, match=next(iter(fields))):
            EngineConfig(**fields)
