"""What the library measures about itself and prints next to what people use today: the verbs of `moe-prefetch bench`."""
