"""Reading a listing of machine code (SASS)."""

from __future__ import annotations

import re

LINE = re.compile(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;", re.M)


def loops_at(code: str) -> list[list[tuple[int, str]]]:
    """Bodies of backward branches, shortest first: (address, text) each."""
    lines = [(int(a, 16), text) for a, text in LINE.findall(code)]
    found = []
    for end, text in lines:
        target = branch(text)
        if target is not None and target < end:
            found.append([(a, t) for a, t in lines if target <= a <= end])
    return sorted(found, key=len)


def loops(code: str) -> list[list[str]]:
    """Bodies of backward branches, shortest first."""
    return [[text for _, text in body] for body in loops_at(code)]


def branch(text: str) -> int | None:
    """Where an instruction jumps to."""
    target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
    return int(target[1], 16) if target else None


def common(body: list[tuple[int, str]]) -> list[str]:
    """What of a loop is left when every branch that skips a part of it is taken."""
    left, resume = [], 0
    for at, text in body:
        if at < resume:
            continue
        left.append(text)
        target = branch(text)
        if target is not None and at < target <= body[-1][0]:
            resume = target
    return left


def unset_uniform(code: str) -> list[str]:
    """Uniform registers whose first appearance in the listing is a read."""
    seen: set[int] = set()
    out = []
    for _, text in LINE.findall(code):
        text = re.sub(r"^@!?U?P\w+\s+", "", text)
        op, _, rest = text.partition(" ")
        writes = re.match(r"UR(\d+)\b", rest)
        reads = [int(n) for n in re.findall(r"(?<!gdesc\[)\bUR(\d+)", rest[writes.end() :] if writes else rest)]
        for first in re.findall(r"gdesc\[UR(\d+)\]", rest):
            # four registers: A's descriptor, unused where A lies in registers, and B's
            reads += range(int(first) + (2 if re.search(r"GMMA\S* R\d+, R\d+,", text) else 0), int(first) + 4)
        out += [f"UR{n}: {text}" for n in reads if n not in seen]
        seen.update(reads)
        if writes:
            # 64-bit results and descriptors take the next register too
            seen.update(range(int(writes[1]), int(writes[1]) + (2 if ".64" in op or "WIDE" in op else 1)))
    return out
