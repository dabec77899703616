"""`python -m moe_prefetch` is `moe-prefetch`."""
from .cli import main

main()
