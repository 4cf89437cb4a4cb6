"""The plots of `python -m cpmcu.bench --plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpmcu.benchmarks.plot import check_plot, draw, read_kernels, save

pytest.importorskip("matplotlib")

PNG = b"\x89PNG\r\n\x1a\n"
RESULT: dict[str, Any] = {
    "model": "some-8b",
    "dtype": "bfloat16",
    "device": "a GPU",
    "rows": [
        {"context": 1024, "step_ms": 2.0, "floor_ms": 1.6},
        {"context": 8192, "step_ms": 2.5, "floor_ms": 2.0},
    ],
}
SPECULATION = {
    "rows": [
        {"context": 1024, "tokens_per_s": 740.0, "mean_accept_length": 3.5},
        {"context": 8192, "tokens_per_s": 510.0, "mean_accept_length": 2.5},
    ],
    "chosen": [],
}
CHOSEN = [
    {"context": 1024, "tokens_per_s": 900.0, "mean_accept_length": 4.0},
    {"context": 8192, "tokens_per_s": 700.0, "mean_accept_length": 3.0},
]


def lines_of(figure: Any, axes: int = 0) -> dict[str, tuple[list[float], list[float]]]:
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
        for line in figure.axes[axes].get_lines()
    }


def test_tokens_per_second_against_context():
    figure = draw(RESULT, [])
    assert lines_of(figure) == {
        "floor of plain decoding": ([1024, 8192], [625.0, 500.0]),
        "plain decoding": ([1024, 8192], [500.0, 400.0]),
    }
    assert len(figure.axes) == 1
    assert "some-8b" in figure.get_suptitle()


def test_speculation_is_another_line():
    figure = draw(RESULT | {"speculation": SPECULATION}, [])
    assert lines_of(figure)["speculation, 3.00 tokens a step"] == ([1024, 8192], [740.0, 510.0])


def test_chosen_shapes_are_another_line():
    figure = draw(RESULT | {"speculation": SPECULATION | {"chosen": CHOSEN}}, [])
    lines = lines_of(figure)
    assert lines["speculation, shapes chosen in each step"] == ([1024, 8192], [900.0, 700.0])
    assert len(lines) == 4


def test_one_context_has_a_floor_too():
    """A curve through one point would be invisible."""
    figure = draw(RESULT | {"rows": RESULT["rows"][:1]}, [])
    lines = lines_of(figure)
    floor = figure.axes[0].get_lines()[list(lines).index("floor of plain decoding")]
    assert floor.get_path().vertices.shape == (2, 2)
    assert lines["floor of plain decoding"] == ([0, 1], [625.0, 625.0])  # from edge to edge
    assert lines["plain decoding"] == ([1024], [500.0])


def test_kernels_are_bars():
    figure = draw(RESULT, [("qkv, M 1", 0.44), ("gate_up, M 1", 0.88)])
    bars = [patch.get_width() for patch in figure.axes[1].patches]
    assert bars == pytest.approx([44, 88])
    assert [label.get_text() for label in figure.axes[1].get_yticklabels()] == [
        "qkv, M 1",
        "gate_up, M 1",
    ]


def test_png(tmp_path: Path):
    path = tmp_path / "picture.png"
    save(RESULT | {"speculation": SPECULATION}, [("o", 0.5)] * 80, path)
    assert path.read_bytes().startswith(PNG)


def test_lines_of_kernel_benchmarks(tmp_path: Path):
    file = tmp_path / "w4.json"
    file.write_text(
        '{"model": "M", "layer": "o", "m": 8, "us": 3.5, "roofline": 0.5}\n\n'
        '{"name": "prefill", "tflops": 500}\n{"name": "decode", "roofline": 1}\n'
    )
    assert read_kernels(file) == [("M o, M 8", 0.5), ("decode", 1.0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("read bandwidth 3000 GB/s\n", "line 1: expected a JSON object"),
        ('{"roofline": 0.5}\n[1]\n', "line 2: expected a JSON object"),
        ('{"us": 3}\n', 'no line with a number "roofline"'),
        ("", 'no line with a number "roofline"'),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "x").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_kernels(tmp_path / "x")


def test_wrong_plot_files_are_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    check_plot(tmp_path / "x.PNG")
    with pytest.raises(ValueError, match=r"x\.pdf, expected a file that ends in \.png"):
        check_plot(tmp_path / "x.pdf")
    with pytest.raises(ValueError, match="is no directory"):
        check_plot(tmp_path / "no" / "x.png")
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: path != tmp_path)
        with pytest.raises(ValueError, match=r"x\.png, which cannot be written"):
            check_plot(tmp_path / "x.png")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install 'cpmcu\\[plot\\]'"):
        check_plot(tmp_path / "x.png")
