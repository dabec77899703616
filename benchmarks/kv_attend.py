"""`moe-prefetch bench kv-attend`, from a checkout; what the other benchmarks of pages share."""

from __future__ import annotations

import sys

from moe_prefetch.bench.kv_attend import (
    CASES,
    COLD,
    SINKS,
    WINDOW,
    Cache,
    Case,
    book_for,
    layout_of,
    main,
    pages_of,
    relative,
    sdpa_us,
    timed,
)

__all__ = [
    "CASES",
    "COLD",
    "SINKS",
    "WINDOW",
    "Cache",
    "Case",
    "book_for",
    "layout_of",
    "main",
    "pages_of",
    "relative",
    "sdpa_us",
    "timed",
]

if __name__ == "__main__":
    sys.exit(main())
