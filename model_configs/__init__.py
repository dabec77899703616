"""One YAML file a model: layer, head and expert numbers, read by `moe_prefetch.config`."""
