"""Block drafters in plain numpy: the reference of DFlash and its kin.

    target = NumpyTarget(fields, weights, np.float64)
    network = NumpyBlock(target, draft.config, draft.weights)
    _, states = target.states(ids, network.layers)  # of the tokens before the root
    lattice = network.lattice(states, root)
    lattice.chain(3), lattice.tree(3, 12)

Each draft is computed anew from all tokens: nothing is kept between steps.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.reference.lilicorr import NumpyLiLiCorr, log_softmax
from tests.reference.numpy_drafts import NumpyTarget, rms_norm, swiglu
from tests.reference.rnn_markov import RnnMarkov

Array = npt.NDArray[Any]

OFF_PATH = float(np.log(0.6))  # added off the greedy path if pairs have no scores
CANDIDATES, OF_DSPARK = 16, 32  # maximum number of candidates of a position

# ---- the network


def merged_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Nested keys override those of the top level."""
    objects = ("transformer_layer_config", "dflash_config", "dspark_config")
    layers, *nested = (config.get(key) or {} for key in objects)
    return {**layers, **config, **nested[0], **nested[1]}


class NumpyBlock:
    """A block drafter that reads a checkpoint's config and tensors, in the dtype of its target."""

    def __init__(
        self,
        target: NumpyTarget,
        config: Mapping[str, Any],
        weights: Mapping[str, Array],
        vocab_ids: Sequence[int] = (),
    ) -> None:
        """`vocab_ids`: the tokens that may be drafted (FR-Spec); none: all."""
        self.target = target
        self.config = config = merged_config(config)
        self.weights = {
            name: array if array.dtype.kind in "iu" else np.asarray(array, target.dtype)
            for name, array in weights.items()
        }
        if config.get("use_gemma_norm"):
            for name in self.weights:
                if name.endswith("norm.weight"):
                    self.weights[name] = self.weights[name] + 1
        self.vocab_ids = list(vocab_ids)
        if "d2t" in weights:
            self.vocab_ids = (weights["d2t"] + np.arange(len(weights["d2t"]))).tolist()
        self.block_size = int(config["block_size"])
        is_speculators = "transformer_layer_config" in config
        is_dspark = "DSpark" in str(config["architectures"]) or "markov_rank" in config
        separate = config.get("dspark_bonus_anchor", is_speculators)
        self.from_anchor = config.get("sample_from_anchor", is_dspark and not separate)
        self.depth = self.block_size if self.from_anchor else self.block_size - 1  # D
        self.first = self.block_size - self.depth  # row that predicts
        self.drafted = 0  # positions that a LiLiCorr head reads; 0: all
        if config.get("projector_type") == "domino":
            self.depth, self.first = self.block_size - 1, 0 if config["shift_label"] else 1
        self.layers = [layer + 1 for layer in config.get("target_layer_ids") or []]
        for key in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
            self.layers = self.layers or config.get(key)
        is_wide = is_dspark or config.get("projector_type") == "domino"
        known = config.get("selector_top_k", config.get("lilicorr_candidate_topk"))
        self.topk = known or (OF_DSPARK if is_wide else CANDIDATES)
        self.has_pairs = any("codebook" in n or "markov_w1" in n for n in self.weights)

    # ---- what config.json says of each layer

    def window(self, layer: int) -> int:
        """The window of a layer in tokens; 0: none."""
        kinds = self._kinds or ["full_attention"] * self._num_layers
        if self.config.get("use_swa") and "sliding_attention" not in kinds:
            kinds = ["sliding_attention"] * self._num_layers
        if kinds[layer] == "full_attention":
            return 0
        return int(self.config.get("swa_window_size") or self.config["sliding_window"])

    def is_causal(self, layer: int) -> bool:
        """Does a row see no later rows of its block?"""
        for key in ("is_causal", "causal", "causal_head"):
            if self.config.get(key) is not None:
                return bool(self.config[key])
        of_speculators = "transformer_layer_config" in self.config
        if of_speculators and self.config.get("sliding_window_non_causal", True):
            return False
        kinds = self._kinds  # use_swa alone makes no layer causal
        return kinds is not None and kinds[layer] == "sliding_attention"

    @property
    def _kinds(self) -> list[str] | None:
        if "layer_types" in self.config or not self.config.get("use_sliding_window"):
            return self.config.get("layer_types")
        full = min(self.config.get("max_window_layers", 28), self._num_layers)
        windows = ["sliding_attention"] * (self._num_layers - full)
        return ["full_attention"] * full + windows

    @property
    def _num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def _inv_freq(self) -> Array:
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        theta = rope.get("rope_theta") or self.config["rope_theta"]
        size = self.config["head_dim"]
        inv_freq = theta ** (-np.arange(0, size, 2, dtype=self.target.dtype) / size)
        kind = rope.get("rope_type", "default")
        assert kind in ("default", "linear")
        return inv_freq / rope["factor"] if kind == "linear" else inv_freq

    # ---- rows

    def context(self, states: Sequence[Array], first: int = 0) -> list[tuple[Array, Array]]:
        """Keys and values [T, Hkv, D] of each layer, from the hidden states of T tokens [T, H].

        The first token is at position `first`.
        """
        joined = np.concatenate(states, -1) @ self.weights["fc.weight"].T
        x = self._norm(joined, "hidden_norm")
        positions = np.arange(first, first + len(x))
        return [
            (self._rotated(x, layer, "k", positions), self._heads(x, layer, "v"))
            for layer in range(self._num_layers)
        ]

    def embedded(self, root: int) -> Array:
        """The inputs of a block [B, H]."""
        table = self.target.weights["model.embed_tokens.weight"]
        scale = self.target.dtype(self.config.get("input_embedding_scale", 1))
        if "mask_embedding" in self.weights:
            mask = self.weights["mask_embedding"]
        else:
            mask = table[self.config["mask_token_id"]]
        return np.stack([table[root], *[mask] * (self.block_size - 1)]) * scale

    def block(self, x: Array, context: Sequence[tuple[Array, Array]]) -> Array:
        """Hidden states [B, H] after the final norm, from the inputs x of the block's rows."""
        for layer in range(self._num_layers):
            prefix = f"layers.{layer}."
            normed = self._norm(x, prefix + "input_layernorm")
            before, after = self._convolutions(prefix + "attention_conv.", normed)
            x = x + after(self._attention(before(normed), layer, context[layer]))
            normed = self._norm(x, prefix + "post_attention_layernorm")
            before, after = self._convolutions(prefix + "mlp_conv.", normed)
            x = x + after(swiglu(before(normed), self.weights, prefix + "mlp."))
        return self._norm(x, "norm")

    def hidden(self, states: Sequence[Array], root: int) -> Array:
        """Hidden states [D, H] of the rows that predict.

        `states`: those of the target's layers [T, H], of the tokens before the root.
        """
        rows = self.block(self.embedded(root), self.context(states))
        return rows[self.first : self.first + self.depth]

    def logits(self, hidden: Array) -> Array:
        """Returns logits [T, V], or [T, draft vocabulary]."""
        own = self.weights.get("lm_head.weight")
        if own is None:
            weights = self.target.weights
            tied = self.target.fields.tie_word_embeddings or "lm_head.weight" not in weights
            own = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        if self.vocab_ids and len(own) != len(self.vocab_ids):
            own = own[self.vocab_ids]
        scale = self.config.get("output_multiplier", self.config.get("logit_scale", 1))
        logits = hidden @ own.T * self.target.dtype(scale)
        cap = self.config.get("final_logit_softcapping")
        return cap * np.tanh(logits / cap) if cap else logits

    def token(self, index: int) -> int:
        """The target's id of an index into the logits."""
        return self.vocab_ids[index] if self.vocab_ids else index

    def lattice(self, states: Sequence[Array], root: int, topk: int = 0) -> Lattice:
        """`topk`: candidates of a position; 0: as the kind of draft says."""
        hidden = self.hidden(states, root)
        logprobs = log_softmax(self.logits(hidden))
        topk = min(topk or self.topk, logprobs.shape[-1])
        chosen = np.argsort(-logprobs, -1, kind="stable")[:, :topk]  # [D, K] draft ids
        tokens = np.vectorize(self.token, otypes=[np.int64])(chosen)
        if self.config.get("markov_head_type") == "rnn":
            return self._rnn_lattice(hidden, logprobs, chosen, tokens, root)
        if self._has_lilicorr:
            return self._lilicorr_lattice(states, hidden, logprobs, chosen, tokens)
        if "projector_type" in self.config:
            return self._domino_lattice(hidden, logprobs, chosen, tokens, root)
        scores = np.empty((self.depth, topk, topk), self.target.dtype)
        for depth in range(self.depth):
            own = logprobs[depth, chosen[depth]]
            for parent in range(topk):
                above = root if depth == 0 else int(tokens[depth - 1, parent])
                below = chosen[depth] if "d2t" in self.weights else tokens[depth]
                scores[depth, parent] = self._scores(own, above, below, hidden[depth])
        return Lattice(tokens, scores, 0.0 if self.has_pairs else OFF_PATH)

    @property
    def _has_lilicorr(self) -> bool:
        return any(name.startswith("lilicorr.") for name in self.weights)

    def _lilicorr_lattice(
        self,
        states: Sequence[Array],
        hidden: Array,
        logprobs: Array,
        chosen: Array,
        tokens: Array,
    ) -> Lattice:
        own = {name.removeprefix("lilicorr."): array for name, array in self.weights.items()}
        depth = self.drafted or self.depth
        context = np.concatenate(states, -1)[-1:] @ self.weights["fc.weight"].T
        scores = NumpyLiLiCorr(self.config, own).scores(
            self.target.weights["model.embed_tokens.weight"][tokens[:depth]],
            np.take_along_axis(logprobs, chosen, -1)[:depth],
            hidden[:depth],
            self._norm(context, "hidden_norm")[0],
        )
        return Lattice(tokens[:depth], scores)

    def _rnn_lattice(
        self, hidden: Array, logprobs: Array, chosen: Array, tokens: Array, root: int
    ) -> Lattice:
        markov = "markov_head."
        joint = self.weights[markov + "joint_proj.weight"]
        columns = 2 * self.weights[markov + "markov_w1.weight"].shape[1]
        rnn = RnnMarkov(
            own=np.take_along_axis(logprobs, chosen, -1),
            root=self.weights[markov + "markov_w1.weight"][root],
            predecessors=self.weights[markov + "markov_w1.weight"][tokens],
            successors=self.weights[markov + "markov_w2.weight"][
                chosen if "d2t" in self.weights else tokens
            ],
            inputs=hidden @ joint[:, columns:].T + self.weights[markov + "joint_proj.bias"],
            weight=joint[:, :columns],
        )
        return PathLattice(tokens, rnn.below)

    def _domino_lattice(
        self, hidden: Array, logprobs: Array, chosen: Array, tokens: Array, root: int
    ) -> Lattice:
        embeddings = self.target.weights["model.embed_tokens.weight"]

        @functools.cache
        def state(path: tuple[int, ...]) -> Array:
            """The state after the root and the tokens of a path."""
            before = state(path[:-1]) if path else np.zeros_like(self._gru[1][0])
            token = int(tokens[len(path) - 1, path[-1]]) if path else root
            return gru(embeddings[token], before, *self._gru)

        def below(path: tuple[int, ...]) -> Array:
            own = np.take_along_axis(logprobs, chosen, -1)[len(path)]
            logits = own
            if path:
                joined = np.concatenate([hidden[len(path)], state(path)])
                low = self.weights["embed_proj.0.weight"] @ joined
                low = low / (1 + np.exp(-low))
                logits = own + self.weights["embed_proj.2.weight"][tokens[len(path)]] @ low
            rest = max(0.0, 1 - float(np.exp(own).sum()))
            return logits - np.log(np.exp(logits).sum() + rest)

        return PathLattice(tokens, below)

    @property
    def _gru(self) -> tuple[Array, Array]:
        names = ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0")
        return self.weights[names[0]], self.weights[names[1]]

    def _scores(self, own: Array, above: int, below: Array, hidden: Array) -> Array:
        """Log-probabilities of the candidates `below`, rows of a codebook, after token `above`."""
        if not self.has_pairs:
            return own
        if "markov_head.markov_w1.weight" in self.weights:
            successors = self.weights["markov_head.markov_w2.weight"][below]
            bigram = successors @ self._predecessor(above, hidden)
            rest = max(0.0, 1 - float(np.exp(own).sum()))
            total = np.exp(own + bigram).sum() + rest
            return own + bigram - np.log(total)
        selector = "candidate_selector."
        gate = self.weights[selector + "hidden_projection.weight"] @ hidden
        successors = self.weights[selector + "successor_codebook"][below]
        edges = successors @ (gate * self.weights[selector + "predecessor_codebook"][above])
        return log_softmax(own + edges) + np.log(np.exp(own).sum())

    def _predecessor(self, above: int, hidden: Array) -> Array:
        """The Markov head's row of a token, times its gate."""
        row = self.weights["markov_head.markov_w1.weight"][above]
        if self.config.get("markov_head_type") != "gated":
            return row
        gate = self.weights["markov_head.gate_proj.weight"] @ np.concatenate([hidden, row])
        return row / (1 + np.exp(-gate - self.weights["markov_head.gate_proj.bias"]))

    # ---- parts of a layer

    def _norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.weights[name + ".weight"], self.config["rms_norm_eps"])

    def _heads(self, x: Array, layer: int, part: str) -> Array:
        name = f"layers.{layer}.self_attn.{part}_proj."
        y = x @ self.weights[name + "weight"].T + self.weights.get(name + "bias", 0)
        return y.reshape(len(x), -1, self.config["head_dim"])

    def _rotated(self, x: Array, layer: int, part: str, positions: Array) -> Array:
        heads = self._norm(self._heads(x, layer, part), f"layers.{layer}.self_attn.{part}_norm")
        angles = positions.astype(x.dtype)[:, None, None] * self._inv_freq
        left, right = np.split(heads, 2, -1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    def _attention(self, x: Array, layer: int, context: tuple[Array, Array]) -> Array:
        length, count = len(context[0]), len(x)
        positions = np.arange(length, length + count)
        q = self._rotated(x, layer, "q", positions)
        k = np.concatenate([context[0], self._rotated(x, layer, "k", positions)])
        v = np.concatenate([context[1], self._heads(x, layer, "v")])
        prefix = f"layers.{layer}.self_attn."
        sinks = self.weights.get(prefix + "attention_sink_bias")
        visible = np.ones((count, length + count), bool)
        distance = positions[:, None] - np.arange(length + count)
        if self.is_causal(layer):
            visible &= distance >= 0
        if self.window(layer):
            visible &= abs(distance) < self.window(layer)
        outputs = []
        for head in range(q.shape[1]):
            at = head // (q.shape[1] // k.shape[1])
            scores = q[:, head] @ k[:, at].T / np.sqrt(x.dtype.type(q.shape[-1]))
            weights = np.where(visible, np.exp(scores), 0)
            total = weights.sum(-1, keepdims=True)
            if sinks is not None:
                total = total + np.exp(sinks[head])
            outputs.append(weights / total @ v[:, at])
        y = np.concatenate(outputs, -1) @ self.weights[prefix + "o_proj.weight"].T
        return y + self.weights.get(prefix + "o_proj.bias", 0)

    def _convolutions(self, prefix: str, normed: Array) -> Any:
        """The convolutions before and after an attention or an MLP, functions of [B, H]."""
        if prefix + "base_kernel" not in self.weights:
            return (lambda x: x), (lambda x: x)
        base = self.weights[prefix + "base_kernel"]  # [side, tap, H]
        sides, taps, width = base.shape
        delta = normed @ self.weights[prefix + "kernel_projection.weight"].T
        delta = delta.reshape(len(normed), sides, taps, -1)  # [row, side, tap, group]
        delta = np.repeat(delta, width // delta.shape[-1], -1)

        def side(index: int) -> Any:
            def convolve(x: Array) -> Array:
                out = np.zeros_like(x)
                for row, tap in itertools.product(range(len(x)), range(taps)):
                    if tap <= row:
                        out[row] += (base[index, tap] + delta[row, index, tap]) * x[row - tap]
                return out

            return convolve

        return side(0), side(1)


def gru(x: Array, state: Array, from_input: Array, from_state: Array) -> Array:
    """The next state of a GRU without biases, whose rows are in the order of torch.nn.GRU."""
    size = len(state)
    of_x, of_state = from_input @ x, from_state @ state
    reset, keep = (
        1 / (1 + np.exp(-of_x[i * size : (i + 1) * size] - of_state[i * size : (i + 1) * size]))
        for i in range(2)
    )
    fresh = np.tanh(of_x[2 * size :] + reset * of_state[2 * size :])
    return (1 - keep) * fresh + keep * state


# ---- drafts


@dataclass
class Lattice:
    """K candidates at each of D positions; scores[d, a, b]: candidate b below candidate a.

    At depth 0 all rows of the scores are equal, those below the root.
    """

    tokens: Array  # [D, K] ids of the target
    scores: Array  # [D, K, K]
    off_path: float = 0.0  # added below a node that is not on the greedy path

    def chain(self, depth: int) -> list[int]:
        """Candidates of the greedy path: at each depth the best one below the one before."""
        path: tuple[int, ...] = ()
        for _ in range(min(depth, len(self.tokens))):
            path = (*path, int(self.below(path).argmax()))
        return list(path)

    def below(self, path: tuple[int, ...]) -> Array:
        """The scores of the candidates below a path."""
        return self.scores[len(path), path[-1] if path else 0]

    def score(self, path: Sequence[int]) -> float:
        """The score of a path of candidates."""
        greedy, total = self.chain(len(path)), 0.0
        for depth, candidate in enumerate(path):
            total += float(self.below(tuple(path[:depth]))[candidate])
            total += 0.0 if list(path[:depth]) == greedy[:depth] else self.off_path
        return total

    def tree(self, depth: int, num_nodes: int) -> list[tuple[int, ...]]:
        """The paths to the num_nodes - 1 best nodes below the root, best first."""
        chosen: list[tuple[int, ...]] = []
        candidates = range(self.tokens.shape[1])
        frontier = {(candidate,): self.score([candidate]) for candidate in candidates}
        while frontier and len(chosen) < num_nodes - 1:
            best = max(frontier, key=lambda path: frontier[path])
            del frontier[best]
            chosen.append(best)
            if len(best) < depth:
                children = [(*best, candidate) for candidate in candidates]
                frontier |= {path: self.score(path) for path in children}
        return chosen

    def draft(self, depth: int, num_nodes: int) -> list[tuple[int, ...]]:
        """The paths of a draft of this shape, a chain if it has one node a depth."""
        if num_nodes <= depth + 1:
            chain = self.chain(num_nodes - 1)
            return [tuple(chain[: i + 1]) for i in range(len(chain))]
        return self.tree(depth, num_nodes)

    def path_of(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The candidates that hold these tokens."""
        return tuple(list(row).index(token) for row, token in zip(self.tokens, tokens))

    def check(
        self, tokens: Sequence[int], parents: Sequence[int], depth: int, margin: float = 1e-4
    ) -> None:
        """Asserts that a drafted tree (node 0: the root) is that of this lattice.

        Nodes whose scores differ by less than `margin` may replace each other.
        """
        expected = self.draft(depth, len(tokens))
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens[1:], parents[1:]):
            paths.append((*paths[parent], token) if token >= 0 else ())
        drafted = [path for path in paths[1:] if path]
        assert len(drafted) == len(expected), (len(drafted), len(expected))
        assert len(set(drafted)) == len(drafted), "two siblings hold the same token"
        assert max(map(len, drafted)) <= depth
        known = [
            all(token in row for token, row in zip(path, self.tokens.tolist())) for path in drafted
        ]
        assert all(known), (drafted, self.tokens)
        scores = [self.score(self.path_of(path)) for path in drafted]
        best = [self.score(path) for path in expected]
        wrong = np.argwhere(np.abs(np.subtract(scores, best)) > margin)[:, 0]
        shown = [[int(self.tokens[i, c]) for i, c in enumerate(path)] for path in expected]
        assert not len(wrong), (int(wrong[0]), drafted, shown, scores, best)


class PathLattice(Lattice):
    """Candidates whose scores depend on all candidates before them."""

    def __init__(self, tokens: Array, below: Callable[[tuple[int, ...]], Array]) -> None:
        super().__init__(tokens, np.zeros(0))
        self._below = functools.cache(below)

    def below(self, path: tuple[int, ...]) -> Array:
        return self._below(path)
