"""The table of `cpmcu plan`."""

from __future__ import annotations

from cpmcu.ui.plan import plan_rows

MIB = 1 << 20


def buffer(name: str, group: str, offset: float, size: float) -> dict[str, object]:
    return {"name": name, "group": group, "offset": int(offset * MIB), "bytes": int(size * MIB)}


BUFFERS = [
    buffer("model.embed", "weights", 0, 4),
    buffer("model.layers.0.mlp", "weights", 4, 1),
    buffer("model.layers.1.mlp", "weights", 5, 2),
    buffer("model.layers.10.mlp", "weights", 7, 2.5),
    buffer("tiny", "weights", 10, 0.01),
    buffer("small", "weights", 10.5, 0.02),
    buffer("kv", "kv", 11, 60),
    buffer("first", "scratch", 71, 8),
    buffer("second", "scratch", 75, 6),
    buffer("third", "scratch", 71, 2),
]


def test_groups_have_totals_and_are_sorted():
    assert plan_rows(BUFFERS, full=False) == [
        ("kv", 1, "60.00", "74.1%"),
        ("  kv", 1, "60.00", "74.1%"),
        ("scratch (shared)", 3, "10.00", "12.3%"),
        ("  first", 1, "8.00", "9.9%"),
        ("  second", 1, "6.00", "7.4%"),
        ("  third", 1, "2.00", "2.5%"),
        ("weights", 6, "9.53", "11.8%"),
        ("  model.layers.*.mlp", 3, "5.50", "6.8%"),
        ("  model.embed", 1, "4.00", "4.9%"),
        ("  others", 2, "0.03", "0.0%"),
        ("total", 10, "81.00", "100.0%"),
    ]


def test_full_lists_every_buffer():
    names = [name for name, *_ in plan_rows(BUFFERS, full=True)]
    assert sorted(each.strip() for each in names if each.startswith(" ")) == sorted(
        str(each["name"]) for each in BUFFERS
    )
    weights = names[names.index("weights") + 1 : names.index("total")]
    assert [name.strip() for name in weights][:2] == ["model.embed", "model.layers.10.mlp"]


def test_an_empty_plan():
    assert plan_rows([], full=False) == [("total", 0, "0.00", "0.0%")]
