"""Pure math over flat token columns: advantages, corrections, loss terms, aggregation, and their composition.

No process groups, no logits, no padding. Torch is used through the tensors that come in; importing a module of this
package does not import it, so that `miles check` can validate an objective without it.
"""
