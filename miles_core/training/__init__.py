"""From a batch to an optimizer step: packing, attention over packs, log-probs, the FSDP backend, checkpoints.

`packing`, `layout`, `schedule` and the component in `fsdp` import no torch; the rest does.
"""
