"""A trap of Triton's and Gluon's compiler: a name that has another one's value before a loop, and is set to that one in the loop, is not
carried through it, without a word. (Seen on an H200: the descriptor of an expert's weights was not made anew.)"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "moe_prefetch" / "kernels"


def aliases(nodes: list[ast.stmt]) -> list[tuple[str, str]]:
    """(name, other name) of every assignment of one to the other in these statements, at any depth."""
    found = [x for node in nodes for x in ast.walk(node) if isinstance(x, ast.Assign) and isinstance(x.value, ast.Name)]
    return [(t.id, x.value.id) for x in found for t in x.targets if isinstance(t, ast.Name) and isinstance(x.value, ast.Name)]


def trapped(source: str) -> list[str]:
    """Names in jitted functions that a loop would not carry."""
    found = []
    for f in ast.walk(ast.parse(source)):
        if not isinstance(f, ast.FunctionDef) or not any("jit" in ast.unparse(d) for d in f.decorator_list):
            continue
        for body in (b for x in ast.walk(f) for b in (getattr(x, "body", None), getattr(x, "orelse", None)) if isinstance(b, list)):
            for i, x in enumerate(body):
                if isinstance(x, ast.For | ast.While):
                    found += [f"{f.name}: {a} = {b}" for a, b in set(aliases(body[:i])) & set(aliases([x]))]
    return found


def test_the_trap_is_seen():
    assert trapped("""
@gluon.jit
def f(n):
    e = g(0)
    known = e
    while e < n:
        if e != known:
            known = e
        e = g(e)
""") == ["f: known = e"]
    assert not trapped("@gluon.jit\ndef f(n):\n    e = g(0)\n    while e < n:\n        e1 = g(e)\n        e = e1\n")


def test_no_kernel_is_in_it():
    paths = sorted(ROOT.rglob("*.py"))
    assert paths
    assert not [f"{p.name} {t}" for p in paths for t in trapped(p.read_text())]
