"""The demo's claim on the real model: the probe waits for far fewer experts than LRU, for few more bytes, with the same tokens."""
from __future__ import annotations

import pytest

from moe_prefetch import demo
from moe_prefetch.integrations.smolmoe import probe_dir
from moe_prefetch.session import attach


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_probe_waits_less_than_lru_at_half_the_experts(smolmoe, tmp_path):
    model, tokenizer = smolmoe
    with attach(model) as session:
        demands = session.record_demands()
        reference, _ = demo.generate(model, tokenizer, 48, lambda: None)
    runs = {}
    for plan in ("lru", "probe", "oracle"):
        with demo._attached(model, tmp_path, "50%", plan, probe_dir("mixed"), demo.DRIVE, demands) as session:
            tokens, seconds = demo.generate(model, tokenizer, 48, lambda: None)
            session.wait_idle()
            runs[plan] = demo._run(plan, "50%", tokens, seconds, session)
        assert tokens == reference
    lru, probe, oracle = runs["lru"], runs["probe"], runs["oracle"]
    assert probe.unmet <= 0.7 * lru.unmet
    assert probe.bytes_read <= 1.2 * lru.bytes_read
    assert oracle.unmet < probe.unmet and oracle.bytes_read < lru.bytes_read
