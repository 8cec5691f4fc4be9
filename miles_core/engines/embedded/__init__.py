"""The embedded engine: a transformers causal LM in its own process, speaking SGLang's HTTP protocol.

Started with ``python -m miles_core.engines.embedded`` (see ``command``). Modules, bottom up:

- ``protocol``      request bodies to typed requests; every refusal is a :class:`~.protocol.BadRequestError`
- ``prefix_cache``  which prompt prefixes have keys and values in which pool slots (pure Python)
- ``scheduler``     which tokens of which sequences the next step computes (pure Python)
- ``kv_pool``       the tensors behind the slots, and the dense rows that decoding reads
- ``attention``     one packed sequence of all tokens in, attention per sequence out
- ``sampler``       logits to tokens and log-probabilities
- ``runner``        one step: plan in, sampled tokens out
- ``weights``       staging, verifying and committing a published version
- ``updates``       weights that arrive in place, over a process group
- ``engine``        the thread that owns all of the above
- ``server``        HTTP
"""
