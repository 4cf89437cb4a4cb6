"""Maps a checkpoint's tensor names to the engine's.

The engine uses the names of a Hugging Face Llama checkpoint. A name map gets one tensor name of the
checkpoint and returns the row ranges that are tensors of the engine. It reads no data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpmcu.models.common import SpecFields


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of rows of a checkpoint tensor, with the engine's name."""

    name: str
    first_row: int = 0
    num_rows: int | None = None  # number of rows from the first one on; None: up to the end
    # Leading dimensions that are flattened into rows; empty: the first dimension.
    leading: tuple[int, ...] = ()
    # The file has a stack of matrices [E, K, N] with leading = (E, N); this is one of them, [N, K].
    transposed: bool = False


NameMap = Callable[[str, "SpecFields"], Sequence[Piece]]
"""(checkpoint name, fields) -> pieces. An empty sequence: a known tensor that is not needed."""

_NOT_NEEDED = re.compile(r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|masked_bias)$")
_FUSED = re.compile(r"^(?P<module>.*\.)(?P<kind>qkv_proj|gate_up_proj)\.(?P<leaf>weight|bias)$")


def canonical_names(name: str, fields: SpecFields) -> Sequence[Piece]:
    """Keeps Llama names, splits `qkv_proj` and `gate_up_proj` by rows, drops rotary buffers."""
    if _NOT_NEEDED.search(name):
        return ()
    fused = _FUSED.match(name)
    if fused is None:
        return (Piece(name),)
    if fused["kind"] == "qkv_proj":
        kv_rows = fields.num_key_value_heads * fields.head_dim
        rows = {
            "q_proj": fields.num_attention_heads * fields.head_dim,
            "k_proj": kv_rows,
            "v_proj": kv_rows,
        }
    else:
        rows = {"gate_proj": fields.intermediate_size, "up_proj": fields.intermediate_size}
    pieces = []
    first_row = 0
    for part, num_rows in rows.items():
        pieces.append(Piece(f"{fused['module']}{part}.{fused['leaf']}", first_row, num_rows))
        first_row += num_rows
    return pieces
