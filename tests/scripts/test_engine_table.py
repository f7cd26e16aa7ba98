"""docs/engines.md holds the table that the switches make."""

import pytest

from refmodel.switches import ENGINES
from scripts.engine_table import DOCUMENT, table, with_table


def test_the_document_holds_the_table():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_table(text) == text, "run: python -m scripts.engine_table"


def test_a_row_names_default_and_sides():
    rows = {row.split(" | ")[0]: [cell.strip(" |") for cell in row.split(" | ")] for row in table().splitlines()}
    assert rows["| switch"][3:] == list(ENGINES)
    sides = dict(zip(ENGINES, rows["| `routed_scale_on`"][3:], strict=True))
    assert rows["| `routed_scale_on`"][2] == "`weights`"
    assert sides == {"hf": "", "vllm": "`output`", "sglang": "", "mlx": "", "official": ""}


def test_a_document_without_marks_is_refused():
    with pytest.raises(ValueError, match="lacks a mark"):
        with_table("# Engines")
