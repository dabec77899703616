"""Host integrations: one module a framework, imported by name by `moe_prefetch.attach`."""
