"""What the documents tell a reader to type exists: make verbs, command-line verbs, Python names, configurations, links, paths."""
from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(path.read_text()) if language in languages]


def commands(text: str) -> str:
    """Everything that is set as code: fenced or between backticks."""
    return "\n".join([body for _, body in FENCE.findall(text)] + re.findall(r"`([^`\n]+)`", text))


def make_verbs() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def cli_verbs() -> set[str]:
    from moe_prefetch.cli import app

    groups = {group.name for group in app.registered_groups}
    return groups | {command.name or command.callback.__name__ for command in app.registered_commands if command.callback} | {"--help"}


def test_the_two_commands_stand_at_the_top_of_the_readme() -> None:
    first = blocks(ROOT / "README.md", "bash", "sh", "")[0].splitlines()
    assert [line.split("#")[0].strip() for line in first] == ["make demo", "make test"]
    assert (ROOT / "README.md").read_text().index("```") < 200
    assert len((ROOT / "README.md").read_text().splitlines()) < 130


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_the_verbs_it_names_exist(path: Path) -> None:
    code = commands(path.read_text())
    assert set(re.findall(r"^\s*make ([a-z][a-z-]*)", code, re.MULTILINE)) <= make_verbs()
    assert set(re.findall(r"moe-prefetch ([a-z][a-z-]*|--\w+)", code)) <= cli_verbs()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_the_python_it_shows_imports(path: Path) -> None:
    for block in blocks(path, "python", "py"):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moe_prefetch"):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("moe_prefetch"):
                        importlib.import_module(alias.name)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "moe_prefetch":
                assert hasattr(importlib.import_module("moe_prefetch"), node.attr), node.attr


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_the_configurations_it_shows_are_valid(path: Path, tmp_path: Path) -> None:
    from moe_prefetch.config import load

    for i, block in enumerate(blocks(path, "yaml")):
        if re.search(r"^version: ", block, re.MULTILINE):
            (tmp_path / f"{i}.yaml").write_text(block)
            load(tmp_path / f"{i}.yaml")


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_its_links_and_paths_lead_somewhere(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), target
    for target in re.findall(r"`((?:docs|tests|scripts|examples|integrations|moe_prefetch|model_configs|benchmarks)/[\w./-]*\w)`", text):
        assert (ROOT / target).exists(), target


def test_the_structure_page_names_every_room() -> None:
    page = (ROOT / "docs/structure.md").read_text()
    rooms = [path for folder in ("moe_prefetch", "integrations") for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py"]
    shapes = {"naive.py", "op.py", "fused.py"}  # one sentence names them for every kernel
    listed = [path.parent.name + "/" if path.name in shapes else path.name for path in rooms]
    assert [room for room in listed if room not in page] == []
    drawn = re.findall(r"^ +(\w+\.py) ", page, re.MULTILINE)
    assert set(drawn) <= {path.name for path in rooms}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_it_speaks_of_the_project_alone(path: Path) -> None:
    assert not re.search(r"(?<![\w.~])/(?:root|work|home)/", path.read_text())
