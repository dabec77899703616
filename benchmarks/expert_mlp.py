"""`moe-prefetch bench expert-mlp`, from a checkout."""

from __future__ import annotations

import sys

from moe_prefetch.bench.expert_mlp import main

if __name__ == "__main__":
    sys.exit(main())
