from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.kernels.util import (
    SMALL,
    context,
    empty,
    empty_structs,
    get_structs,
    on_devices,
    ops,
    put,
    put_ints,
    put_raw,
    sizes,
)
from tests.reference import ops as reference

DEFAULTS = {"top_p": 1, "repetition_penalty": 1, "num_logprobs": -1}


def slots_of(*fields: dict[str, Any]) -> np.ndarray:
    """One element of slot_sampling_dtype for each slot. The default is greedy."""
    slots = np.zeros(len(fields), ops.slot_sampling_dtype)
    for slot, values in zip(slots, fields):
        for name, value in {**DEFAULTS, **values}.items():
            slot[name] = value
    return slots


def sample(
    device: str,
    logits: np.ndarray,
    slots: np.ndarray,
    token_slots: Sequence[int] | np.ndarray | None = None,
    positions: Sequence[int] | np.ndarray | None = None,
    counts: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    mask_rows: Sequence[int] | np.ndarray | None = None,
    masks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and logprobs of the rows. Without token_slots, all rows belong to slot 0."""
    num_rows = len(logits)
    tokens = empty(device, [num_rows], "int32")
    logprobs = empty_structs(device, [num_rows], ops.token_logprobs_dtype)
    ops.sample(
        context(device), logits=put(device, logits), tokens=tokens, logprobs=logprobs,
        token_slots=put_ints(device, np.zeros(num_rows) if token_slots is None else token_slots),
        token_positions=put_ints(device, np.arange(num_rows) if positions is None else positions),
        sampling=put_raw(device, slots),
        counts=None if counts is None else put_ints(device, counts),
        bias=None if bias is None else put(device, bias),
        mask_rows=None if mask_rows is None else put_ints(device, mask_rows),
        masks=None if masks is None else put_raw(device, masks.view(np.uint8)),
    )  # fmt: skip
    return tokens.numpy(), get_structs(logprobs, ops.token_logprobs_dtype)


def random_logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3) -> np.ndarray:
    logits = np.random.default_rng(seed).standard_normal((num_rows, vocab_size)) * scale
    return logits.astype(np.float32).astype(np.float64)


VOCABS = sizes(1030, 1, 2, 7, 33, 4096, 73448, 151936, small=1)


# ---- greedy


@on_devices
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_greedy(device: str, vocab_size: int) -> None:
    logits = random_logits(5, vocab_size)
    tokens, _ = sample(device, logits, slots_of({}))
    assert tokens.tolist() == logits.argmax(1).tolist()


@on_devices
@pytest.mark.parametrize("vocab_size", sizes(4096, 7, 73448, small=1))
def test_greedy_ties_go_to_the_lower_id(device: str, vocab_size: int) -> None:
    logits = random_logits(4, vocab_size)
    expected = []
    for row, z in enumerate(logits):
        tied = np.random.default_rng(row).integers(vocab_size, size=5)
        z[tied] = 100
        expected.append(tied.min())
    logits[3], expected[3] = 0.25, 0
    tokens, _ = sample(device, logits, slots_of({}))
    assert tokens.tolist() == expected


@on_devices
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("vocab_size", sizes(1030, 33, 151936, small=1))
def test_logits_that_are_not_finite_draw_no_token(
    device: str, temperature: float, vocab_size: int
) -> None:
    """NaN or +inf at any place of a row; -inf only in the whole row."""
    fields = {"temperature": temperature, "top_p": 0.9, "num_logprobs": 3}
    slots = slots_of(fields, {**fields, "use_penalties": 1, "use_bias": 1})
    counts, bias = penalty_state(2, vocab_size)
    logits = random_logits(8, vocab_size)
    logits[0, vocab_size - 1], logits[1], logits[2, vocab_size // 2] = np.nan, np.nan, -np.nan
    logits[3, 0], logits[4] = np.inf, -np.inf
    logits[5, 1:] = logits[6, 1::2] = -np.inf
    for slot in (0, 1):
        tokens, logprobs = sample(
            device, logits, slots, token_slots=[slot] * 8, counts=counts, bias=bias
        )
        assert tokens[:5].tolist() == [ops.NO_TOKEN] * 5
        assert tokens[5] == 0 and tokens[6] % 2 == 0 and 0 <= tokens[7] < vocab_size
        assert np.isfinite(logprobs["logprob"][5:]).all()


@on_devices
def test_an_infinity_that_penalties_make_is_drawn(device: str) -> None:
    logits = np.full((1, 100), 1e3)
    counts = np.zeros((1, 100), np.int64)
    counts[0, 42] = 1
    for temperature in (0.0, 1.0):
        slots = slots_of(
            {"temperature": temperature, "use_penalties": 1, "repetition_penalty": 1e-38}
        )
        tokens, _ = sample(device, logits, slots, counts=counts)
        assert tokens.tolist() == [42]


# ---- the draw

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 6, "top_p": 0.8, "temperature": 1.3},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.02, "temperature": 0.7},
]
if SMALL:
    FILTERS = [FILTERS[0], *FILTERS[-2:]]
statistical = pytest.mark.skipif(SMALL, reason="needs many draws")


def with_defaults(fields: dict[str, Any]) -> dict[str, Any]:
    return {"temperature": 1.0, "seed": 0x123456789ABCDEF, "stream": 3, **fields}


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_reference_philox(counter: list[int], key: list[int], expected: str) -> None:
    """The known answers of the paper's authors."""
    words = reference.philox(counter, key)
    assert " ".join(f"{int(word):08x}" for word in words) == expected


@on_devices
@pytest.mark.parametrize("fields", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_draws_what_the_reference_draws(
    device: str, vocab_size: int, fields: dict[str, Any]
) -> None:
    num_rows = 2 if SMALL else 3 if vocab_size > 10000 else 40
    logits = random_logits(num_rows, vocab_size, scale=2)
    positions = np.arange(num_rows) * 1000 + 5
    slots = slots_of(with_defaults(fields))
    tokens, _ = sample(device, logits, slots, positions=positions)
    for row, token in enumerate(tokens):
        scores = reference.draw_scores(logits[row], slots[0], int(positions[row]))
        # Float32 rounding may swap scores that are this close.
        assert scores[token] >= scores.max() - 1e-4, f"row {row}"


@statistical
@on_devices
@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_distribution(device: str, fields: dict[str, Any]) -> None:
    draws = 20000
    z = np.array([2.0, 0.5, 0.5, -1.0, 1.9, -3.0, 0.0, 1.0, -0.5, 0.2, 1.5])
    slots = slots_of(with_defaults(fields))
    tokens, _ = sample(device, np.tile(z, (draws, 1)), slots)
    p = reference.distribution(z, slots[0])
    observed = np.bincount(tokens, minlength=len(z))
    assert not observed[p == 0].any()
    expected = p[p > 0] * draws
    chi_square = float(((observed[p > 0] - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    # The limit is five standard deviations above the mean.
    assert chi_square <= freedom + 5 * np.sqrt(2 * freedom), f"{chi_square} for {freedom}"


@statistical
@on_devices
def test_ties_at_the_thresholds_are_kept(device: str) -> None:
    z = np.array([1.0, 1.0, 1.0, 0.0, 0.0, -1.0])
    for fields, allowed in (
        ({"top_k": 2}, {0, 1, 2}),
        ({"top_k": 4}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.1}, {0, 1, 2}),
        ({"top_p": 0.85}, {0, 1, 2, 3, 4}),
    ):
        tokens, _ = sample(device, np.tile(z, (300, 1)), slots_of(with_defaults(fields)))
        assert set(tokens.tolist()) == allowed, fields


@on_devices
def test_a_tiny_temperature_is_greedy(device: str) -> None:
    logits = random_logits(4 if SMALL else 20, 1000)
    tokens, _ = sample(device, logits, slots_of({"temperature": 1e-8, "seed": 1, "top_p": 0.9}))
    assert tokens.tolist() == logits.argmax(1).tolist()


@on_devices
def test_seed_stream_and_position_change_the_draw(device: str) -> None:
    logits = np.zeros((8, 2000 if SMALL else 5000))
    base = {"temperature": 1.0, "seed": 1, "stream": 0}
    others = [{}, {"seed": 2}, {"seed": 1 + (1 << 32)}, {"stream": 1}]
    slots = slots_of(*({**base, **other} for other in others))
    token_slots, positions = [0, 1, 2, 3] * 2, [0] * 4 + [1] * 4
    tokens, _ = sample(device, logits, slots, token_slots, positions)
    assert len(set(tokens.tolist())) == 8


@on_devices
def test_a_draw_does_not_depend_on_the_batch(device: str) -> None:
    num_rows = 4 if SMALL else 33
    logits = random_logits(num_rows, 3001)
    fields = [with_defaults({**f, "seed": i}) for i, f in enumerate(FILTERS)]
    slots = slots_of(*fields, {})
    token_slots = np.arange(num_rows) % len(slots)
    positions = np.arange(num_rows) * 7
    together, _ = sample(device, logits, slots, token_slots, positions)
    order = np.random.default_rng(0).permutation(num_rows)
    shuffled, _ = sample(device, logits[order], slots, token_slots[order], positions[order])
    assert shuffled.tolist() == together[order].tolist()
    for row in range(num_rows):
        alone, _ = sample(
            device, logits[row : row + 1], slots, token_slots[[row]], positions[[row]]
        )
        assert alone[0] == together[row]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", sizes(1031, 4096, 151936, small=1))
def test_cuda_draws_what_the_cpu_draws(vocab_size: int) -> None:
    slots = slots_of(*(with_defaults(fields) for fields in FILTERS))
    logits = random_logits(len(slots), vocab_size, seed=9)
    rows = np.arange(len(slots))
    tokens = [sample(d, logits, slots, rows, rows)[0].tolist() for d in ("cuda", "cpu")]
    assert tokens[0] == tokens[1]


# ---- penalties and bias

PENALTIES: list[dict[str, Any]] = [
    {"use_penalties": 1, "repetition_penalty": 1.3},
    {"use_penalties": 1, "repetition_penalty": 0.7},
    {"use_penalties": 1, "presence_penalty": 1.5},
    {"use_penalties": 1, "frequency_penalty": 0.4},
    {"use_penalties": 1, "frequency_penalty": -0.4, "presence_penalty": -1},
    {"use_penalties": 1, "repetition_penalty": 1.2, "presence_penalty": 0.3,
     "frequency_penalty": 0.1, "use_bias": 1},
    {"use_bias": 1},
    {"presence_penalty": 5.0, "repetition_penalty": 9.0},  # not used, as use_penalties is 0
]  # fmt: skip
FEW_PENALTIES = PENALTIES[-3:-1] if SMALL else PENALTIES


def penalty_state(num_slots: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 5, (num_slots, vocab_size)) * (rng.random((1, vocab_size)) < 0.5)
    counts |= np.where(rng.random(counts.shape) < 0.3, ops.PROMPT_BIT, 0)
    bias = rng.standard_normal(counts.shape) * (rng.random(counts.shape) < 0.2) * 4
    return counts, bias.astype(np.float32).astype(np.float64)


@on_devices
@pytest.mark.parametrize("vocab_size", sizes(501, 7, 73448, small=1))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_and_bias(device: str, vocab_size: int, temperature: float) -> None:
    num_slots = len(FEW_PENALTIES)
    slots = slots_of(*({**f, "temperature": temperature, "seed": 5} for f in FEW_PENALTIES))
    counts, bias = penalty_state(num_slots, vocab_size)
    num_rows = num_slots * (1 if SMALL or vocab_size > 10000 else 20)
    logits = random_logits(num_rows, vocab_size, scale=2)
    token_slots = np.arange(num_rows) % num_slots
    tokens, _ = sample(device, logits, slots, token_slots, counts=counts, bias=bias)
    for row, token in enumerate(tokens):
        slot = token_slots[row]
        z = reference.adjusted(logits[row], slots[slot], counts[slot], bias[slot])
        scores = z if temperature == 0 else reference.draw_scores(z, slots[slot], row)
        assert scores[token] >= scores.max() - 1e-4, f"row {row}: {FEW_PENALTIES[slot]}"


@on_devices
def test_a_token_may_be_forbidden_by_bias(device: str) -> None:
    bias = np.zeros((1, 50))
    bias[0, 1:] = -np.inf
    for temperature in (0.0, 1.0):
        slots = slots_of({"use_bias": 1, "temperature": temperature, "top_p": 0.9})
        tokens, _ = sample(device, random_logits(2, 50), slots, bias=bias)
        assert not tokens.any()


# ---- masks


def packed(allowed: np.ndarray) -> np.ndarray:
    """Masks [M, ceil(V / 32)] of allowed tokens [M, V]. Bits beyond the vocabulary are set."""
    padding = -allowed.shape[1] % 32
    bits = np.pad(allowed, ((0, 0), (0, padding)), constant_values=True)
    return np.packbits(bits, axis=1, bitorder="little").view("<u4")


def random_masks(num_masks: int, vocab_size: int, seed: int = 3) -> np.ndarray:
    """Allowed tokens [M, V]. The first mask allows one, the last all, the others some."""
    rng = np.random.default_rng(seed)
    shares = np.linspace(0.02, 0.98, num_masks)
    allowed = rng.random((num_masks, vocab_size)) < shares[:, None]
    allowed[0] = False
    allowed[np.arange(num_masks), rng.integers(vocab_size, size=num_masks)] = True
    allowed[-1] = True
    return allowed


MASKED: list[dict[str, Any]] = [
    {},
    *(with_defaults(fields) for fields in FILTERS),
    *({**fields, "temperature": t, "seed": 5} for fields in FEW_PENALTIES for t in (0.0, 0.9)),
]


@on_devices
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_masks(device: str, vocab_size: int) -> None:
    """A masked row draws the same token as a row whose other logits are -inf."""
    slots = slots_of(*MASKED)
    num_rows = len(slots)
    counts, bias = penalty_state(num_rows, vocab_size)
    allowed = random_masks(5, vocab_size)
    rng = np.random.default_rng(2)
    logits = random_logits(num_rows, vocab_size, scale=2)
    token_slots = np.arange(num_rows)
    common = {"token_slots": token_slots, "counts": counts, "bias": bias}
    plain, _ = sample(device, logits, slots, **common)
    patterns = [rng.integers(-1, 5, num_rows), np.zeros(num_rows), np.full(num_rows, -1)]
    for mask_rows in patterns[:1] if SMALL else patterns:
        masks = {"mask_rows": mask_rows, "masks": packed(allowed)}
        tokens, _ = sample(device, logits, slots, **common, **masks)
        may = np.where((mask_rows < 0)[:, None], True, allowed[mask_rows.astype(int)])
        expected, _ = sample(device, np.where(may, logits, -np.inf), slots, **common)
        expected = np.where(may.any(1), expected, 0)
        assert tokens.tolist() == expected.tolist()
        assert may[token_slots, tokens].all()
        assert tokens[mask_rows < 0].tolist() == plain[mask_rows < 0].tolist()


@on_devices
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_empty_mask_draws_the_first_token(device: str, temperature: float) -> None:
    """If a mask allows no token, id 0 is drawn, as if all logits were -inf."""
    masks = np.zeros((1, 4), np.uint32)
    slots = slots_of({"temperature": temperature, "top_p": 0.9})
    logits = random_logits(2, 100)
    tokens, _ = sample(device, logits, slots, mask_rows=[0, -1], masks=masks)
    assert tokens[0] == 0
    assert tokens[1] == sample(device, logits, slots)[0][1]


@on_devices
def test_a_mask_does_not_hide_infinity(device: str) -> None:
    logits = random_logits(2, 77)
    logits[:, 40] = np.inf
    allowed = np.ones((1, 77), bool)
    allowed[0, 40] = False
    for temperature in (0.0, 1.0):
        slots = slots_of({"temperature": temperature})
        tokens, _ = sample(device, logits, slots, mask_rows=[0, -1], masks=packed(allowed))
        assert tokens.tolist() == [ops.NO_TOKEN] * 2


@on_devices
def test_logprobs_are_those_without_the_mask(device: str) -> None:
    logits = random_logits(3, 1001)
    allowed = random_masks(3, 1001)
    slots = slots_of({"num_logprobs": 7})
    tokens, masked = sample(device, logits, slots, mask_rows=[0, 1, 2], masks=packed(allowed))
    _, plain = sample(device, logits, slots)
    assert np.array_equal(masked["top_ids"][:, :7], plain["top_ids"][:, :7])
    assert np.array_equal(masked["top_logprobs"][:, :7], plain["top_logprobs"][:, :7])
    expected = [reference.log_softmax(z)[token] for z, token in zip(logits, tokens)]
    assert np.allclose(masked["logprob"], expected, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", sizes(1031, 4099, 151936, small=1))
def test_cuda_draws_what_the_cpu_draws_with_masks(vocab_size: int) -> None:
    slots = slots_of(*MASKED)
    rows = np.arange(len(slots))
    counts, bias = penalty_state(len(slots), vocab_size)
    tokens = [
        sample(
            device, random_logits(len(slots), vocab_size, seed=9), slots, rows, rows, counts, bias,
            rows % 6 - 1, packed(random_masks(5, vocab_size)),
        )[0].tolist()
        for device in ("cuda", "cpu")
    ]  # fmt: skip
    assert tokens[0] == tokens[1]


@on_devices
def test_rows_do_not_depend_on_the_number_of_rows(device: str) -> None:
    """On a GPU, a row has more CTAs if there are few rows."""
    logits = np.random.default_rng(5).normal(0, 3, (70, 5003)).astype(np.float32)
    fields = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 3, "num_logprobs": 4}
    slots = slots_of(fields)
    tokens, logprobs = sample(device, logits, slots, positions=np.arange(70))
    for count in (1, 29, 30, 66):
        some, some_logprobs = sample(device, logits[:count], slots, positions=np.arange(count))
        assert np.array_equal(some, tokens[:count])
        assert np.array_equal(some_logprobs["logprob"], logprobs["logprob"][:count])
        for field in ("top_ids", "top_logprobs"):
            assert np.array_equal(some_logprobs[field][:, :4], logprobs[field][:count, :4])


# ---- logprobs


@on_devices
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_logprobs(device: str, vocab_size: int, temperature: float) -> None:
    counts, bias = penalty_state(3, vocab_size)
    fields = {"temperature": temperature, "use_penalties": 1, "use_bias": 1,
              "presence_penalty": 1.0, "top_p": 0.9}  # fmt: skip
    slots = slots_of(*({**fields, "num_logprobs": n} for n in (0, 5, 20)))
    logits = random_logits(6, vocab_size)
    token_slots = [0, 1, 2] * 2
    tokens, logprobs = sample(device, logits, slots, token_slots, counts=counts, bias=bias)
    for row, result in enumerate(logprobs):
        expected = reference.log_softmax(logits[row])  # log-probabilities of raw logits
        assert abs(result["logprob"] - expected[tokens[row]]) < 1e-4
        count = min(int(slots[token_slots[row]]["num_logprobs"]), vocab_size)
        order = np.argsort(-logits[row], kind="stable")[:count]
        assert result["top_ids"][:count].tolist() == order.tolist()
        assert np.allclose(result["top_logprobs"][:count], expected[order], atol=1e-4)


@on_devices
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_logprobs_of_named_tokens(device: str, vocab_size: int) -> None:
    """They keep the order in which the slot names them. Other slots get their likeliest tokens."""
    named = np.random.default_rng(1).integers(0, vocab_size, 20).astype(np.int32)
    slots = slots_of(*({"num_logprobs": n} for n in (1, 7, 20, 5)))
    slots["names_logprobs"] = [1, 1, 1, 0]
    slots["logprob_ids"][:3] = named
    logits = random_logits(4, vocab_size)
    _, logprobs = sample(device, logits, slots, token_slots=[3, 2, 1, 0])
    for row, (result, count) in enumerate(zip(logprobs, (5, 20, 7, 1))):
        expected = reference.log_softmax(logits[row])
        ids = named[:count] if row else np.argsort(-logits[row], kind="stable")[:count]
        count = len(ids)
        assert result["top_ids"][:count].tolist() == ids.tolist()
        assert np.allclose(result["top_logprobs"][:count], expected[ids], atol=1e-4)


@on_devices
def test_equal_logprobs_are_ordered_by_id(device: str) -> None:
    z = np.array([[0, 3, 1, 3, 1, 1, -np.inf, -np.inf, 3, 1.0]])
    _, logprobs = sample(device, z, slots_of({"num_logprobs": 9}))
    assert logprobs[0]["top_ids"][:9].tolist() == [1, 3, 8, 2, 4, 5, 9, 0, 6]
    assert logprobs[0]["top_logprobs"][8] == -np.inf


@on_devices
def test_logprobs_are_not_written_without_a_request(device: str) -> None:
    slots = slots_of({"num_logprobs": 1}, {})
    _, logprobs = sample(device, random_logits(2, 64), slots, token_slots=[1, 0])
    assert np.isnan(logprobs[0]["logprob"]) and logprobs[0]["top_ids"][0] == -1
    assert np.isfinite(logprobs[1]["logprob"])


# ---- errors


@on_devices
def test_mask_rows_need_masks(device: str) -> None:
    with pytest.raises(ValueError, match="masks"):
        sample(device, random_logits(1, 8), slots_of({}), mask_rows=[0])


@on_devices
def test_logits_must_be_float32(device: str) -> None:
    with pytest.raises(ValueError, match="float16"):
        ops.sample(
            context(device), logits=empty(device, [1, 8], "float16"),
            token_slots=put_ints(device, [0]), token_positions=put_ints(device, [0]),
            sampling=put_raw(device, slots_of({})), tokens=empty(device, [1], "int32"),
        )  # fmt: skip
