"""The shape of the project: one-way imports, no module that is too long, nothing named that should not be."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("fp8", "refmodel", "parallel", "scripts")  # each may import itself and the ones before it
CORE = {"numpy", "einops", "ml_dtypes"}
OPTIONAL = {
    "scripts": {"rich", "matplotlib", "torch", "transformers", "mpi4py"},
    "parallel": {"mpi4py"},
    "refmodel": {"torch", "pytest"},
}
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def imports(path):
    """(top-level name, whether at module level) of every import."""
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0], id(node) in top


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path):
    relative = path.relative_to(ROOT)
    room = relative.parts[0]
    if str(relative) == "refmodel/__main__.py" or "adapters" in relative.parts:  # the door to the commands; engine side
        return
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    for name, _ in imports(path):
        if name in ROOMS:
            assert name in allowed, f"{relative} imports {name}"
        elif name not in sys.stdlib_module_names:
            assert name in CORE | OPTIONAL.get(room, set()), f"{relative} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_optional_packages_are_imported_where_they_are_used(path):
    relative = path.relative_to(ROOT)
    if str(relative) in ("scripts/tables.py", "refmodel/golden/plugin.py") or "adapters" in relative.parts:
        return
    for name, top in imports(path):
        assert not (top and name in ("rich", "matplotlib", "torch", "transformers", "mpi4py", "pytest")), (
            f"{relative}: {name}"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_hold_one_concept(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(text)) or not text.strip(), "a module says what it is"


def test_every_rounding_point_is_used_and_every_use_is_listed():
    from refmodel.numerics import ROUNDING_POINTS

    used = set()
    for path in (ROOT / "refmodel").rglob("*.py"):
        text = path.read_text()
        used |= set(re.findall(r'store\([^"\n]*"(\w+)"\)', text)) | set(re.findall(r'add\(.*"(\w+)"\)', text))
    # the ordered sums of combine round in place (refmodel/experts.py), the gate in `route`
    in_place = {"weighted_row", "combine_sum", "router_scores", "router_weights"}
    assert used | in_place == set(ROUNDING_POINTS)
